"""SGLang's Triton extend kernel, which a verify step runs through: real tree mask, one head a program, no split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harness.bench_inputs import Workload
from harness.peers.base import TREE, Contender, Output, PeerRefused, missing, needs_cuda
from harness.peers.sglang_source import load_kernel_module
from verify_numba.dims import D_V

Kernel = Callable[..., Any]


class SGLangTriton:
    name = "sglang-triton"

    def available(self, device: torch.device) -> str | None:
        return kernel_missing("extend_attention", device)

    def prepare(self, work: Workload) -> Contender:
        kernel = load_kernel_module("extend_attention").extend_attention_fwd
        return bind(self.name, kernel, work, TREE)


def kernel_missing(module: str, device: torch.device) -> str | None:
    """Why a kernel module of SGLang cannot be used, or None."""
    try:
        load_kernel_module(module)
    except Exception as error:  # noqa: BLE001 - a foreign package may fail in any way; the reason is shown
        return missing("SGLang's kernel", error)
    return needs_cuda(device)


def bind(name: str, kernel: Kernel, work: Workload, mask: str, **extra: Any) -> Contender:
    """Calls with the arguments of `TritonAttnBackend.forward_extend`; a returned False is a refusal."""
    out = torch.empty(*work.q.shape[:2], D_V, dtype=work.q.dtype, device=work.device)
    k, v = work.k, work.k[..., :D_V].contiguous()
    pool_v = work.pool[..., :D_V]

    def call(slots: torch.Tensor) -> None:
        took = kernel(
            *(
                work.q,
                k,
                v,
                out,
                work.pool,
                pool_v,
                work.qo_indptr,
                work.kv_indptr,
                slots,
            ),
            *(
                work.custom_mask,
                True,
                work.mask_indptr,
                work.shape.T,
                1.0,
                1.0,
                work.sm_scale,
            ),
            **extra,
        )
        if took is False:
            raise PeerRefused("it hands this shape back to SGLang's default kernel")

    calls = [lambda slots=slots: call(slots) for slots in work.kv_indices]
    return Contender(name, calls, Output(out), mask)
