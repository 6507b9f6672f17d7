"""From a fit on one GPU to a predicted step on another, against that card's floors.

Three things may hold up a worker at each tile: the kernel's own chain of work, in cycles as on the measured GPU; the
memory, which all busy workers share; and the tensor cores of the worker's two SMs. If they overlap perfectly the
longest of them rules (`low_us`); if the two longest do not overlap at all, they add up (`high_us`).
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.model_card import Card
from harness.model_fit import Fit, H, Line, Split, T, split, workers
from harness.work import FLOPS_PER_PAIR, Ceilings, Floor, count_work, floor
from verify_numba.dims import ROW_BYTES
from verify_numba.geometry import TILE

TILE_FLOPS = TILE * T * H * FLOPS_PER_PAIR
TILE_BYTES = TILE * ROW_BYTES
TAIL_CELLS = T * (T + 1) // 2
"""Visible cells of a chain, the most that a tree of T tokens has."""


@dataclass(frozen=True)
class Prediction:
    """Microseconds of one step on a card, and its floors there. `limits` are microseconds a tile and worker."""

    L: int
    split: Split
    limits: dict[str, float]
    fixed_us: float
    floor: Floor

    @property
    def rules(self) -> str:
        """The limiter that takes longest a tile: "kernel", "memory" or "mma"."""
        return max(self.limits, key=lambda name: self.limits[name])

    @property
    def low_us(self) -> float:
        return self.fixed_us + self.split.share * max(self.limits.values())

    @property
    def high_us(self) -> float:
        return self.fixed_us + self.split.share * sum(sorted(self.limits.values())[-2:])


@dataclass(frozen=True)
class Held:
    """A measured line beside its prediction."""

    line: Line
    prediction: Prediction

    @property
    def ratios(self) -> tuple[float, float]:
        """Measured over the low and over the high prediction."""
        return self.line.us / self.prediction.low_us, self.line.us / self.prediction.high_us

    @property
    def verdict(self) -> str:
        to_low, to_high = self.ratios
        return "faster" if to_low < 1 else "slower" if to_high > 1 else "inside"


def predict(measured: Fit, clock_ghz: float, card: Card, L: int) -> Prediction:
    """A step with H = 8, T = 9, bs = 1 and prefix `L`; `clock_ghz` is the clock at which `measured` was measured."""
    shares = split(L, card.sms)
    worker_flops = card.mma_tflops * 1e12 / card.sms * 2
    limits = {
        "kernel": measured.tile_us * clock_ghz / card.boost_ghz,
        "memory": shares.busy * TILE_BYTES / (card.bandwidth_gbps * 1e9) * 1e6,
        "mma": TILE_FLOPS / worker_flops * 1e6,
    }
    ceilings = Ceilings(card.bandwidth_gbps * 1e9, card.mma_tflops * 1e12)
    return Prediction(L, shares, limits, measured.fixed_us, floor(count_work([L], T, H, TAIL_CELLS), ceilings))


def assumptions(measured: Fit, clock_ghz: float, card: Card) -> list[str]:
    """What a prediction for `card` takes for granted, a line each."""
    return [
        f"{card.basis}: published figures, not measured; --boost, --bandwidth and --mma replace them",
        f"{workers(card.sms)} workers of two SMs each run side by side, one block an SM",
        f"a tile takes as many cycles as on the measured GPU: {measured.tile_us * clock_ghz * 1e3:.0f}, from --clock "
        f"{clock_ghz:g} GHz",
        f"the fixed cost stays {measured.fixed_us:.1f} us, whatever the clock",
        "latents are cold (the L2 plays no part); memory and mma.sync reach their published rates",
    ]
