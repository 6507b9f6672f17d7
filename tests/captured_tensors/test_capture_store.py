"""Cases on disk: bit for bit, whole or not at all, and one clear error for everything else."""

import errno
import os
import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from captured_tensors import CaptureCase, CaptureError, iter_case_paths, load_case, save_case
from tests.capture_files import small_case, small_meta, small_parts


def assert_same(a: CaptureCase, b: CaptureCase) -> None:
    assert a.meta == b.meta
    assert a.tensors().keys() == b.tensors().keys()
    for name, array in a.tensors().items():
        other = b.tensors()[name]
        assert (array.dtype, array.shape) == (other.dtype, other.shape), name
        assert array.tobytes() == other.tobytes(), name


@given(
    seed=st.integers(0, 999),
    index=st.sampled_from([np.int32, np.int64]),
    mask=st.sampled_from([bool, np.uint8]),
    layout=st.sampled_from(["FULL_MASK", "QLEN_ONLY", "CHAIN"]),
    stale=st.sampled_from([0, 16]),
    triton=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_round_trip(tmp_path_factory, seed, index, mask, layout, stale, triton):
    parts = small_parts(seed, index_dtype=index, mask_dtype=mask, mask_layout=layout, stale=stale)
    if not triton:
        parts["out_triton"] = None
    meta = small_meta(mask_layout=layout, extra={"seed": str(seed)})
    case = CaptureCase(name="x", meta=meta, **parts)
    path = tmp_path_factory.mktemp("cases") / "x.safetensors"
    save_case(case, path)
    assert load_case(path).name == "x"
    assert_same(case, load_case(path))


def test_every_bf16_pattern_survives(tmp_path):
    """All 65,536 bit patterns, NaN payloads and negative zero among them."""
    bits = np.arange(2**16, dtype=np.uint16)
    q = np.resize(bits, 200 * 576).reshape(200, 1, 576).view(ml_dtypes.bfloat16)
    rows = q[:0]
    empty = np.zeros(0, np.int64)
    slots = np.arange(1, 201)
    case = CaptureCase(
        name="all",
        meta=small_meta(num_heads=1, max_extend_len=200, mask_layout="CHAIN"),
        q=q,
        k=q,
        v=q[..., :512],
        qo_indptr=np.array([0, 200]),
        kv_indptr=np.array([0, 0]),
        kv_indices=empty,
        custom_mask=None,
        mask_indptr=None,
        out_cache_loc=slots,
        seq_lens=np.array([0]),
        req_pool_indices=np.array([1]),
        positions=slots,
        prefix_rows=rows,
        tail_rows=q,
    )
    save_case(case, tmp_path / "all.safetensors")
    back = load_case(tmp_path / "all.safetensors")
    np.testing.assert_array_equal(back.q.view(np.uint16).ravel()[: 2**16], bits)


def test_strided_queries_are_stored_by_value(tmp_path):
    case = small_case(q_layout="heads-first")
    save_case(case, tmp_path / "s.safetensors")
    assert_same(case, load_case(tmp_path / "s.safetensors"))


def test_no_overwriting_unless_asked(tmp_path):
    path = tmp_path / "s.safetensors"
    save_case(small_case(0), path)
    with pytest.raises(CaptureError, match=r"s\.safetensors: is there already"):
        save_case(small_case(1), path)
    assert_same(load_case(path), small_case(0))
    save_case(small_case(1), path, overwrite=True)
    assert_same(load_case(path), small_case(1))


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CaptureError, match="cannot be written: No space left") as caught:
        save_case(small_case(), tmp_path / "s.safetensors")
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_no_case(tmp_path, monkeypatch):
    """What is on the disk before the rename is not taken for a case."""
    monkeypatch.setattr(os, "replace", lambda *_: None)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    save_case(small_case(), tmp_path / "s.safetensors")
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(CaptureError, match=r"no \.safetensors file"):
        list(iter_case_paths(tmp_path))


def test_the_suffix_is_required(tmp_path):
    with pytest.raises(CaptureError, match=r"a case file ends in \.safetensors"):
        save_case(small_case(), tmp_path / "s.bin")


def test_a_missing_folder_is_one_error(tmp_path):
    with pytest.raises(CaptureError, match="cannot be written: No such file"):
        save_case(small_case(), tmp_path / "no" / "s.safetensors")


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "s.safetensors"
    save_case(small_case(), path)
    return path


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.001, 0.01, 0.5, 0.99999])
def test_truncated_files_are_refused(stored, share):
    data = stored.read_bytes()
    stored.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CaptureError, match=r"s\.safetensors: not a whole safetensors file"):
        load_case(stored)


@pytest.mark.parametrize(
    "data",
    [
        b"\x93NUMPY\x01\x00" + b"\0" * 99,
        pickle.dumps({"q": 1}),
        b"{}",
        b"\xff" * 4096,
        b"PK\x03\x04" + b"\0" * 500,
    ],
    ids=["npy", "pickle", "json", "ones", "zip"],
)
def test_foreign_files_are_refused(tmp_path, data):
    path = tmp_path / "foreign.safetensors"
    path.write_bytes(data)
    with pytest.raises(CaptureError, match=r"foreign\.safetensors: not a whole safetensors file"):
        load_case(path)


def test_no_file_and_a_folder_are_one_error(tmp_path):
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(CaptureError, match="cannot be read"):
            load_case(path)


def raw(**changes):
    tensors = {**{k: np.ascontiguousarray(v) for k, v in small_parts().items()}, **changes}
    return {name: array for name, array in tensors.items() if array is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefix_rows": None, "k": None}, "tensors missing: k, prefix_rows"),
        ({"weights": np.zeros(3, np.int32)}, "unknown tensors: weights"),
        ({"q": np.zeros((9, 2, 576), np.float16)}, "q: found dtype F16, expected BF16 or I32"),
        ({"seq_lens": np.array([3, 9])}, "seq_lens: found 9 for request 1"),
    ],
)
def test_broken_files_are_refused_by_path_and_field(tmp_path, changes, message):
    path = tmp_path / "b.safetensors"
    save_file(raw(**changes), path, metadata=small_meta().to_strings())
    with pytest.raises(CaptureError, match=rf"b\.safetensors: {message}"):
        load_case(path)


def test_a_file_without_metadata_is_refused(tmp_path):
    path = tmp_path / "b.safetensors"
    save_file(raw(), path)
    with pytest.raises(
        CaptureError, match="metadata missing: layer_id, max_extend_len, num_heads, pool_slots, sm_scale"
    ):
        load_case(path)
