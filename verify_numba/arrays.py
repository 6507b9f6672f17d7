"""NumPy arrays and torch tensors as plain numbers: address, shape, byte strides, dtype, device. No copy is made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
        return ITEM_BYTES.get(self.dtype, 1) + sum([(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)])


ITEM_BYTES = {"bfloat16": 2, "float32": 4, "int32": 4, "int64": 8, "bool": 1, "uint8": 1}
_TORCH_NAMES: dict[Any, str] = {}


def view(field: str, array: Any) -> View:
    """The view of a NumPy array or a strided torch tensor. Raises VerifyInputError for anything else."""
    if isinstance(array, np.ndarray):
        if not array.dtype.isnative:
            raise VerifyInputError(field, f"{array.dtype.str} in foreign byte order", "this machine's byte order")
        return View(array.ctypes.data, array.shape, array.strides, array.dtype.name, -1)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _torch_view(torch, field, array)
    raise VerifyInputError(field, f"of type {type(array).__name__}", "a NumPy array or a torch tensor")


def _torch_view(torch: Any, field: str, tensor: Any) -> View:
    dtype = tensor.dtype
    name = _TORCH_NAMES.get(dtype)
    if name is None:
        name = _TORCH_NAMES[dtype] = str(dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided:
        raise VerifyInputError(field, f"a tensor of layout {tensor.layout}", "a strided tensor")
    device = tensor.get_device()
    if not (tensor.is_cuda or (device < 0 and tensor.device.type == "cpu")):
        raise VerifyInputError(field, f"on {tensor.device}", "on the CPU or a CUDA device")
    size = dtype.itemsize
    strides = tuple([size * s for s in tensor.stride()])
    return View(tensor.data_ptr(), tuple(tensor.shape), strides, name, device)


def same_metadata(arrays: Sequence[Any]) -> Callable[..., bool]:
    """A predicate of as many arrays: whether each has the type, dtype, device, shape and strides of its forerunner.

    A false "no" is possible, a false "yes" is not. It keeps no array alive. It is never true of NumPy arrays.
    """
    torch = sys.modules.get("torch")
    if torch is None or not all(isinstance(array, torch.Tensor) for array in arrays):
        return _never
    try:
        # One call for all tensors, a fifth of what asking each for its attributes costs. torch.compile decides with it
        # whether code that it specialised for some tensors fits others.
        from torch._C._dynamo.guards import TensorGuards

        check: Callable[..., bool] = TensorGuards(
            *arrays, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
    except (ImportError, AttributeError, TypeError):
        return _same_attributes(arrays)
    return check


def _never(*_: Any) -> bool:
    return False


def _same_attributes(tensors: Sequence[Any]) -> Callable[..., bool]:
    """`same_metadata` of strided tensors in torch's public names."""

    def attributes(tensors: Sequence[Any]) -> list[Any]:
        return [(type(t), t.dtype, t.layout, t.device, t.shape, t.stride()) for t in tensors]

    known = attributes(tensors)

    def check(*others: Any) -> bool:
        try:
            return attributes(others) == known
        except (AttributeError, RuntimeError):  # not a tensor, or one without strides
            return False

    return check


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
