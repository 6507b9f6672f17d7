"""FlashInfer's paged MLA wrapper, backends fa2 and fa3: page size 1, causal mask only, compiled on first use.

It is driven as SGLang drives it for a verify step: q [N, H, 576] goes in as two views without a copy, `qo_indptr`
gives T rows a request, `causal` lets draft token i see the prefix and tokens 0..i. Inside, the T*H rows of a request
lie token by token and are cut into tiles of 64: T=9 and H=8 make 72 rows, for which its planner pairs two blocks on
every stretch of keys, 66 pairs on 132 SMs. That is its own choice; no other layout of the same rows has fewer tiles.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from harness.bench_inputs import Workload
from harness.peers.base import CHAIN, Contender, Output, missing, needs_cuda
from verify_numba.dims import D_ROPE, D_V

WORKSPACE_BYTES = 128 << 20
MIN_MAJOR = {"fa2": 8, "fa3": 9}
MAX_MAJOR = {"fa2": 99, "fa3": 9}


class FlashInfer:
    """Each call owns or shares, through its wrapper, the workspaces and the plan that a captured graph points to."""

    def __init__(self, backend: str) -> None:
        self.name, self._backend = f"flashinfer-{backend}", backend

    def available(self, device: torch.device) -> str | None:
        try:
            importlib.import_module("flashinfer.mla")
        except Exception as error:  # noqa: BLE001 - a foreign package may fail in any way; the reason is shown
            return missing("flashinfer", error)
        return needs_cuda(device) or self._wrong_gpu(device)

    def prepare(self, work: Workload) -> Contender:
        mla: Any = importlib.import_module("flashinfer.mla")
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=work.device)
        wrapper = mla.BatchMLAPagedAttentionWrapper(workspace, backend=self._backend)
        _plan(wrapper, work, torch.cat(work.sets[0]).int())
        out = torch.empty(*work.q.shape[:2], D_V, dtype=work.q.dtype, device=work.device)
        calls = [_Call(wrapper, work, work.pool[index * work.shift :], out) for index in range(work.n_sets)]
        return Contender(self.name, calls, Output(out), CHAIN, note="chain mask")

    def _wrong_gpu(self, device: torch.device) -> str | None:
        major, minor = torch.cuda.get_device_capability(device)
        if MIN_MAJOR[self._backend] <= major <= MAX_MAJOR[self._backend]:
            return None
        return f"its {self._backend} kernel does not run on compute capability {major}.{minor}"


class _Call:
    """Slots are fixed when the wrapper plans: a later slot set is the same slots in a pool that starts later."""

    def __init__(self, wrapper: Any, work: Workload, pool: Tensor, out: Tensor) -> None:
        self._wrapper, self._out = wrapper, out
        self._inputs = work.q[..., :D_V], work.q[..., D_V:], pool[..., :D_V], pool[..., D_V:]

    def __call__(self) -> None:
        self._wrapper.run(*self._inputs, out=self._out)


def _plan(wrapper: Any, work: Workload, indices: Tensor) -> None:
    shape = work.shape
    lengths = torch.tensor([length + shape.T for length in shape.lengths], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    wrapper.plan(
        work.qo_indptr.int(),
        starts.to(work.device),
        indices,
        lengths.to(work.device),
        shape.H,
        D_V,
        D_ROPE,
        1,  # page size
        True,  # causal
        work.sm_scale,
        work.q.dtype,
        work.pool.dtype,
    )
