"""The GPUs of compute capability 12.0 that the model speaks of. Every figure here is a published one: none was measured
by this project, and each can be replaced by an option of `model`. docs/performance.md names the sources."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from harness.errors import UsageError

HALF_RATE, FULL_RATE = 512, 1024
"""bf16 operations a clock and SM through mma.sync with float32 sums. Assumed: half on GeForce, all on RTX PRO."""


@dataclass(frozen=True)
class Card:
    """`boost_ghz` is the clock under load; `bandwidth_gbps` 10^9 bytes a second; `mma_per_clock` a clock and SM."""

    key: str
    name: str
    sms: int
    boost_ghz: float
    bandwidth_gbps: float
    mma_per_clock: float

    @property
    def mma_tflops(self) -> float:
        return self.sms * self.boost_ghz * self.mma_per_clock / 1e3

    @property
    def basis(self) -> str:
        """The card's inputs as one line to read."""
        return (
            f"{self.name}: {self.sms} SMs, {self.boost_ghz:g} GHz, {self.bandwidth_gbps:g} GB/s, mma.sync bf16 "
            f"{self.mma_tflops:.1f} TFLOP/s ({self.mma_per_clock:.0f} operations a clock and SM)"
        )


CARDS = (
    Card("pro6000", "RTX PRO 6000 Blackwell", 188, 2.617, 1792.0, FULL_RATE),
    Card("5090", "RTX 5090", 170, 2.407, 1792.0, HALF_RATE),
)


def with_inputs(card: Card, boost: float | None, bandwidth: float | None, mma: float | None) -> Card:
    """`card` with what the user knows better: GHz, GB/s, TFLOP/s. The rate a clock stays where only the clock moves."""
    card = replace(card, boost_ghz=boost or card.boost_ghz, bandwidth_gbps=bandwidth or card.bandwidth_gbps)
    if mma is None:
        return card
    return replace(card, mma_per_clock=mma * 1e3 / (card.sms * card.boost_ghz))


def by_key(key: str) -> Card:
    """The card that `--card` names."""
    return next(card for card in CARDS if card.key == key)


def by_machine(where: str, machine: dict[str, Any]) -> Card:
    """The card on which a result was measured, by its name and its number of SMs. Raises UsageError."""
    gpu, sms = machine.get("gpu"), machine.get("sms")
    for card in CARDS:
        if card.name in str(gpu) and card.sms == sms:
            return card
    known = " or ".join(f"{card.name} ({card.sms} SMs)" for card in CARDS)
    raise UsageError(f"{where}: measured on {gpu} ({sms} SMs), expected {known}; --card says which to hold it against")
