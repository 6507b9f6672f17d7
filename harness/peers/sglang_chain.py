"""SGLang's split-KV verify kernels: they take a chain of draft tokens only and infer it, never reading the mask."""

from __future__ import annotations

import torch

from harness.bench_inputs import Workload
from harness.peers.base import CHAIN, Contender, PeerRefused
from harness.peers.sglang_source import load_kernel_module
from harness.peers.sglang_triton import bind, kernel_missing


class SGLangSharedKV:
    """The grouped-head kernel (from 0.5.23) for one KV head that all query heads share, MLA among them."""

    name = "sglang-sharedkv"

    def available(self, device: torch.device) -> str | None:
        return kernel_missing("verify_mla", device)

    def prepare(self, work: Workload) -> Contender:
        kernel = load_kernel_module("verify_mla").verify_shared_kv_fwd
        contender = bind(self.name, kernel, work, CHAIN, max_bs=work.shape.bs)
        contender.note = "chain mask"
        return contender


class SGLangSplitKV:
    """The kernel for one head a program. It is named here so that nobody misses it, and never called.

    Release 0.5.17 accepts MLA's shapes and then reads out of bounds, which would take a whole run down with it; later
    releases refuse them and say that the kernel faults there.
    """

    name = "sglang-splitkv"

    def available(self, device: torch.device) -> str | None:
        return kernel_missing("verify_splitkv", device) or (
            "does not do MLA: it needs keys as wide as values, and faults on 576 and 512"
        )

    def prepare(self, work: Workload) -> Contender:
        raise PeerRefused("does not do MLA")
