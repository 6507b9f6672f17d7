"""The thread that turns staged calls into case files that `replay` takes."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from captured_tensors import CaptureCase, CaptureError, CaptureMeta, save_case
from captured_tensors.schema import BF16
from sglang_glue.backend import BackendFacts, version_of
from sglang_glue.settings import CaptureSettings, CaptureWhen

if TYPE_CHECKING:
    from sglang_glue.capture import Stage

log = logging.getLogger(__name__)

Array = np.ndarray[Any, np.dtype[Any]]

POLL_S = 0.005
STALE_KEPT = 64
"""Entries kept behind the end of kv_indices and custom_mask: what follows them is stale, which replay must bear."""


class CaptureWriter:
    """Writes cases until the folder's limit is reached or the disk fails; then it closes."""

    def __init__(self, settings: CaptureSettings, facts: BackendFacts) -> None:
        self._settings = settings
        self._facts = facts
        self._gpu = torch.cuda.get_device_name(facts.device) if facts.device.startswith("cuda") else facts.device
        self._counts: Counter[str] = Counter()
        self._number = itertools.count()
        self._waiting: queue.SimpleQueue[Stage] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Stage] = queue.SimpleQueue()
        self.closed = False
        threading.Thread(target=self._loop, name="verify-numba-capture", daemon=True).start()

    def take(self, stage: Stage) -> None:
        """Write this stage when it has arrived."""
        self._waiting.put(stage)

    def returned(self) -> list[Stage]:
        """Stages that may be filled again."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def counts(self) -> dict[str, int]:
        """Cases written (`written`) or dropped, by reason."""
        return dict(self._counts)

    def _loop(self) -> None:
        while True:
            stage = self._waiting.get()
            while not stage.arrived.item():
                time.sleep(POLL_S)
            self._counts[self._outcome(stage)] += 1
            self._done.put(stage)

    def _outcome(self, stage: Stage) -> str:
        if self.closed:
            return "closed"
        try:
            return self._write(stage)
        except CaptureError as error:
            if isinstance(error.__cause__, OSError):
                return self._close("disk", error)
            log.warning("verify-numba: a sampled call is not a valid case: %s", error)
            return "invalid"
        except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the server
            return self._close("error", error)

    def _close(self, reason: str, error: Exception) -> str:
        self.closed = True
        log.error("verify-numba: capturing stops: %s", error)
        return reason

    def _write(self, stage: Stage) -> str:
        arrays = {name: to_numpy(tensor) for name, tensor in stage.tensors.items()}
        mismatch = arrays.pop("mismatch", None)
        if self._settings.when is CaptureWhen.MISMATCH and not (mismatch is not None and mismatch[0]):
            return "agrees"
        used = int(arrays["kv_indptr"][-1])
        if used > len(arrays["prefix_rows"]):
            return "too_long"
        if np.any(arrays["kv_indices"][:used] == 0):  # the sink: a dummy batch from the server's own warm-up
            return "padding"
        size = sum(array.nbytes for array in arrays.values())
        if _bytes_in(self._settings) + size > self._settings.max_bytes:
            self.closed = True
            log.warning("verify-numba: capturing stops: KDTREE_CAPTURE_BYTES is reached")
            return "limit"
        case = self._case(_trimmed(arrays, used, stage.about["T"]), stage.about)
        save_case(case, self._settings.folder / f"{case.name}.safetensors")
        return "written"

    def _case(self, arrays: dict[str, Array], about: dict[str, Any]) -> CaptureCase:
        bs = len(arrays["qo_indptr"]) - 1
        parts = [self._facts.algorithm, f"bs{bs}", f"t{about['T']}", f"prefix{arrays['kv_indptr'][-1]}"]
        where = [f"layer{about['layer']}", self._facts.rank, str(os.getpid()), str(next(self._number))]
        seq_lens = np.diff(arrays["kv_indptr"].astype(np.int64))
        tensors: dict[str, Any] = {"custom_mask": None, "mask_indptr": None, "seq_lens": seq_lens, **arrays}
        layout = "CHAIN" if tensors["custom_mask"] is None else "FULL_MASK"
        return CaptureCase(name="-".join(parts + where), meta=self._meta(about, layout), **tensors)

    def _meta(self, about: dict[str, Any], layout: str) -> CaptureMeta:
        return CaptureMeta(
            sm_scale=about["sm_scale"],
            num_heads=about["H"],
            max_extend_len=about["T"],
            layer_id=about["layer"],
            pool_slots=self._facts.pool_slots,
            algorithm=self._facts.algorithm.upper(),
            mode="TARGET_VERIFY eager",
            mask_layout=layout,
            model=self._facts.model,
            gpu=self._gpu,
            sglang=version_of("sglang"),
            torch=torch.__version__,
            triton=version_of("triton"),
            extra={"rank": self._facts.rank, "step": str(about["step"])},
        )


def to_numpy(tensor: torch.Tensor) -> Array:
    """A host tensor as an array over the same memory; bf16 becomes `ml_dtypes.bfloat16`, bit for bit."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BF16)
    return tensor.numpy()


def _trimmed(arrays: dict[str, Array], used: int, T: int) -> dict[str, Array]:
    trimmed = {**arrays, "prefix_rows": arrays["prefix_rows"][:used]}
    trimmed["kv_indices"] = arrays["kv_indices"][: used + STALE_KEPT]
    if "custom_mask" in arrays:
        bs = len(arrays["qo_indptr"]) - 1
        trimmed["custom_mask"] = arrays["custom_mask"][: T * (used + bs * T) + STALE_KEPT]
    return trimmed


def _bytes_in(settings: CaptureSettings) -> int:
    return sum(path.stat().st_size for path in settings.folder.glob("*.safetensors"))
