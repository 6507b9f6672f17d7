"""SGLang's split-KV verify kernels: they take a chain of draft tokens only and infer it, never reading the mask."""

from __future__ import annotations

import torch

from harness.bench_inputs import Workload
from harness.peers.base import CHAIN, Contender
from harness.peers.sglang_source import load_kernel_module
from harness.peers.sglang_triton import bind, kernel_missing


class SGLangChain:
    """`function` of SGLang's kernel module `module`; both take the arguments of `extend_attention_fwd`."""

    def __init__(self, name: str, module: str, function: str) -> None:
        self.name, self._module, self._function = name, module, function

    def available(self, device: torch.device) -> str | None:
        return kernel_missing(self._module, device)

    def prepare(self, work: Workload) -> Contender:
        kernel = getattr(load_kernel_module(self._module), self._function)
        contender = bind(self.name, kernel, work, CHAIN, max_bs=work.shape.bs)
        contender.note = "chain mask"
        return contender
