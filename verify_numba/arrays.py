"""NumPy arrays and torch tensors as plain numbers: address, shape, byte strides, dtype name, device. No copy is made."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from verify_numba.errors import VerifyInputError


class View(NamedTuple):
    """Where an array lies. `device` is -1 on the host, else the GPU's ordinal."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes."""
    dtype: str
    device: int

    @property
    def nbytes_spanned(self) -> int:
        """Bytes from the first to behind the last element."""
        if 0 in self.shape:
            return 0
        size = ITEM_BYTES.get(self.dtype, 1)
        return size + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


ITEM_BYTES = {"bfloat16": 2, "float32": 4, "int32": 4, "int64": 8, "bool": 1, "uint8": 1}
_TORCH_NAMES: dict[Any, str] = {}


def view(field: str, array: Any) -> View:
    """The view of a NumPy array or a strided torch tensor. Raises VerifyInputError for anything else."""
    if isinstance(array, np.ndarray):
        return View(array.ctypes.data, array.shape, array.strides, array.dtype.name, -1)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _torch_view(torch, field, array)
    raise VerifyInputError(field, type(array).__name__, "a NumPy array or a torch tensor")


def _torch_view(torch: Any, field: str, tensor: Any) -> View:
    dtype = tensor.dtype
    name = _TORCH_NAMES.get(dtype)
    if name is None:
        name = _TORCH_NAMES[dtype] = str(dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided:
        raise VerifyInputError(field, f"a tensor of layout {tensor.layout}", "a strided tensor")
    size = dtype.itemsize
    strides = tuple([size * s for s in tensor.stride()])
    device = tensor.get_device()
    if device < 0 and tensor.device.type != "cpu":
        raise VerifyInputError(field, f"on {tensor.device}", "on the CPU or a CUDA device")
    return View(tensor.data_ptr(), tuple(tensor.shape), strides, name, device)


def host_array(array: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """The array itself, or a NumPy view of a CPU tensor (a copy from a GPU); bf16 as `ml_dtypes.bfloat16`."""
    if isinstance(array, np.ndarray):
        return array
    import torch
    from ml_dtypes import bfloat16

    tensor = array.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(bfloat16)
    return tensor.numpy()
