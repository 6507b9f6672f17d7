"""Choose eager verify calls, copy them to pinned memory without waiting, and hand them to the writer.

Everything on the serving thread is enqueued work: gathers on the device, copies into a staging buffer, and last a
flag. The writer polls that flag in host memory, so neither side synchronises and no CUDA call is made elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sglang_glue.backend import BackendFacts, CurrentBatch, SlotCall
from sglang_glue.capture_writer import CaptureWriter
from sglang_glue.settings import CaptureSettings

STAGES = 2
"""Calls that may wait for the disk; the next ones are not sampled while all are taken."""

_ALIGN = 64


@dataclass
class Stage:
    """Pinned memory for one call, its tensors in it, and the flag that says that they have arrived."""

    arrived: Tensor
    buffer: Tensor
    tensors: dict[str, Tensor] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def on(cls, device: str) -> Stage:
        pinned = device.startswith("cuda")
        return cls(torch.zeros(1, dtype=torch.uint8, pin_memory=pinned), torch.empty(0, dtype=torch.uint8))

    def fill(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Enqueue the copies and, behind them, the flag."""
        self.arrived.zero_()
        self.about = about
        self._reserve(sum(_padded(t) for t in tensors.values()))
        self.tensors, start = {}, 0
        for name, tensor in tensors.items():
            place = self.buffer[start : start + tensor.numel() * tensor.element_size()]
            self.tensors[name] = place.view(tensor.dtype).view(tensor.shape)
            self.tensors[name].copy_(tensor, non_blocking=True)
            start += _padded(tensor)
        done = torch.ones(1, dtype=torch.uint8, device=tensors["q"].device)
        self.arrived.copy_(done, non_blocking=True)

    def _reserve(self, size: int) -> None:
        if self.buffer.numel() < size:
            self.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self.arrived.is_pinned())


class Capture:
    """Samples the calls of one backend."""

    def __init__(self, settings: CaptureSettings, facts: BackendFacts, current: CurrentBatch) -> None:
        self._settings = settings
        self.current = current
        self._layers = list(facts.layer_of.values())
        self._steps = 0
        self._skipped: Counter[str] = Counter()
        self._writer = CaptureWriter(settings, facts)
        self._free = [Stage.on(facts.device) for _ in range(STAGES)]

    def offer(self, call: SlotCall, row: int, mismatch: Tensor | None, triton: Callable[[], Tensor]) -> None:
        """Take this call if it is sampled. `triton` gives Triton's output for it; `mismatch` is on the device."""
        if row == 0:
            self._steps += 1
        if not self._wanted(row):
            return
        self._free += self._writer.returned()
        batch = self.current.forward_batch
        if batch is None:
            self._skipped["no_batch"] += 1
        elif not self._free:
            self._skipped["busy"] += 1
        else:
            tensors = self._tensors(call, batch, mismatch, triton())
            self._free[-1].fill(tensors, self._about(call, row))
            self._writer.take(self._free.pop())

    def counts(self) -> dict[str, int]:
        """Cases written, and calls that were sampled but not written, by reason."""
        return {**self._writer.counts(), **dict(self._skipped)}

    def _wanted(self, row: int) -> bool:
        if self._writer.closed or row >= len(self._layers) or (self._steps - 1) % self._settings.every:
            return False
        return self._settings.layers is None or self._layers[row] in self._settings.layers

    def _tensors(self, call: SlotCall, batch: Any, mismatch: Tensor | None, triton: Tensor) -> dict[str, Tensor]:
        # How long the prefixes are is known on the device only: copy up to the limit, the writer trims or drops.
        most = min(call.kv_indices.numel(), self._settings.max_prefix)
        slots = call.kv_indices[:most].clamp(0, call.k_buffer.shape[0] - 1)
        loc = batch.out_cache_loc[: call.q.shape[0]]
        found = {
            "q": call.q,
            "k": call.k,
            "v": call.v,
            "qo_indptr": call.qo_indptr,
            "kv_indptr": call.kv_indptr,
            "kv_indices": call.kv_indices[:most],
            "out_cache_loc": loc,
            "req_pool_indices": batch.req_pool_indices[: call.bs],
            "positions": batch.positions[: call.q.shape[0]],
            "prefix_rows": call.k_buffer[slots],
            "tail_rows": call.k_buffer[loc],
            "out_triton": triton.reshape(call.q.shape[0], -1),
        }
        if call.custom_mask is not None:
            cells = call.max_extend_len * (most + call.q.shape[0])
            found |= {"custom_mask": call.custom_mask[:cells], "mask_indptr": call.mask_indptr}
        if mismatch is not None:
            found["mismatch"] = mismatch.view(1)
        return found

    def _about(self, call: SlotCall, row: int) -> dict[str, Any]:
        return {
            "layer": self._layers[row],
            "sm_scale": float(call.sm_scale),
            "T": int(call.max_extend_len),
            "H": int(call.q.shape[1]),
            "step": self._steps,
        }


def _padded(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return -(-size // _ALIGN) * _ALIGN
