from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from ml_dtypes import bfloat16

from captured_tensors import read_manifest
from harness.cli import main
from harness.devices import CudaDevice, HostDevice, select_device

torch = pytest.importorskip("torch")

EVERY_BF16 = np.arange(1 << 16, dtype=np.uint16).view(bfloat16).reshape(-1, 4)


@pytest.fixture(params=["host memory", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """The torch device; where there is no GPU its tensors lie in host memory."""
    if request.param == "gpu":
        return select_device("gpu")
    cuda = SimpleNamespace(current_device=lambda: 0)
    names = ("from_numpy", "full", "int16", "bfloat16", "float32")
    on_host = CudaDevice(SimpleNamespace(cuda=cuda, **{name: getattr(torch, name) for name in names}))
    on_host.name = "cpu"
    return on_host


def test_bf16_survives_bit_for_bit_nan_payloads_included(device):
    there = device.put(EVERY_BF16)
    assert there.dtype == torch.bfloat16
    np.testing.assert_array_equal(device.get(there).view(np.uint16), EVERY_BF16.view(np.uint16))
    assert float(device.put(np.ones(1, bfloat16))[0]) == 1.0


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.bool_, np.float32])
def test_other_dtypes_keep_dtype_and_values(device, dtype):
    array = np.array([0, 1, 1], dtype)
    array.flags.writeable = False
    back = device.get(device.put(array))
    assert back.dtype == dtype
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("dtype", [bfloat16, np.float32])
def test_poison_is_nan_of_the_right_dtype(device, dtype):
    for poisoned in (device.get(device.poisoned((2, 3), dtype)), HostDevice().poisoned((2, 3), dtype)):
        assert (poisoned.shape, poisoned.dtype) == ((2, 3), dtype)
        assert np.isnan(poisoned.astype(np.float32)).all()


def test_auto_takes_the_cpu_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device("auto").name == select_device("cpu").name == "cpu"


@pytest.mark.gpu
def test_the_shipped_cases_replay_on_the_gpu(capsys):
    assert main(["replay", "--device", "gpu", "--permute-slots", "1"]) == 0
    shipped = len(read_manifest().entries)
    assert f": {shipped} pass" in " ".join(capsys.readouterr().out.split())
