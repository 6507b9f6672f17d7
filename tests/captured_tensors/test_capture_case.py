"""What a case is, and every way in which one can be refused."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from captured_tensors import CaptureCase, CaptureError, CaptureMeta
from tests.capture_files import META, small_case, small_meta, small_parts
from tests.cases import make_batch

BF16 = ml_dtypes.bfloat16


def build(**changes):
    return CaptureCase(name="small", meta=small_meta(), **{**small_parts(), **changes})


def test_sizes_and_spans():
    case = small_case()
    assert (case.bs, case.N, case.T, case.H) == (2, 9, 5, 2)
    assert case.prefix_lengths == (3, 6)
    assert case.draft_lengths == (5, 4)
    assert case.rows_of(1) == slice(5, 9)
    assert case.prefix_of(1) == slice(3, 9)


def test_case_is_frozen():
    case = small_case()
    with pytest.raises(dataclasses.FrozenInstanceError):
        case.q = None
    with pytest.raises(ValueError, match="read-only"):
        case.q[0] = 0


def test_the_callers_arrays_stay_writable():
    parts = small_parts()
    CaptureCase(name="small", meta=small_meta(), **parts)
    assert parts["q"].flags.writeable


@pytest.mark.parametrize("layout", ["FULL_MASK", "QLEN_ONLY"])
@pytest.mark.parametrize("dtype", [np.bool_, np.uint8])
def test_tree_mask_reads_the_draft_columns(layout, dtype):
    parts = small_parts(tree="dense", mask_layout=layout, mask_dtype=dtype)
    case = CaptureCase(name="small", meta=small_meta(mask_layout=layout), **parts)
    for b, t in enumerate(case.draft_lengths):
        assert case.tree_mask(b).shape == (t, t)
        assert case.tree_mask(b).dtype == np.bool_
        assert case.tree_mask(b).all()


def test_a_chain_has_no_mask():
    case = CaptureCase(name="small", meta=small_meta(mask_layout="CHAIN"), **small_parts(mask_layout="CHAIN"))
    np.testing.assert_array_equal(case.tree_mask(1), np.tri(4, dtype=bool))


def test_stale_tails_are_legal():
    indices, mask = small_parts()["kv_indices"], small_parts()["custom_mask"]
    garbage = np.array([-4690148522180166202, 2**62, -1])
    case = build(kv_indices=np.concatenate([indices[:9], garbage]), custom_mask=np.append(mask, [True] * 99))
    assert len(case.kv_indices) == 12


def test_batch_of_none_is_legal():
    batch = make_batch(0, prefix=(), drafts=(), H=2, stale=0)
    empty = np.zeros(0, np.int64)
    case = CaptureCase(
        name="none",
        meta=small_meta(),
        q=batch.q,
        k=batch.k,
        v=batch.k[..., :512],
        qo_indptr=batch.qo_indptr,
        kv_indptr=batch.kv_indptr,
        kv_indices=batch.kv_indices,
        custom_mask=batch.custom_mask,
        mask_indptr=batch.mask_indptr,
        out_cache_loc=empty,
        seq_lens=empty,
        req_pool_indices=empty,
        positions=empty,
        prefix_rows=batch.k,
        tail_rows=batch.k,
    )
    assert (case.bs, case.N, case.out_triton) == (0, 0, None)


def test_padding_may_share_the_sink():
    """Two tokens written to slot 0: the row there is the last one's."""
    parts = small_parts()
    slots, rows = parts["out_cache_loc"].copy(), parts["tail_rows"].copy()
    slots[[0, 1]] = 0
    rows[0] = rows[1]
    assert build(out_cache_loc=slots, tail_rows=rows).N == 9


def changed(name, at, value):
    array = small_parts()[name].copy()
    array[at] = value
    return {name: array}


def cut(name, size):
    return {name: small_parts()[name][:size]}


def cast(name, dtype):
    return {name: small_parts()[name].astype(dtype)}


INDICES = [
    "qo_indptr",
    "kv_indptr",
    "kv_indices",
    "mask_indptr",
    "out_cache_loc",
    "seq_lens",
    "req_pool_indices",
    "positions",
]
ROWS = ["q", "k", "v", "prefix_rows", "tail_rows", "out_triton"]

BROKEN = [
    *[(cast(name, np.float32), f"{name}: found dtype float32, expected int32 or int64") for name in INDICES],
    *[(cast(name, np.float16), f"{name}: found dtype float16, expected bfloat16") for name in ROWS],
    (cast("custom_mask", np.int32), "custom_mask: found dtype int32, expected bool or uint8"),
    *[
        ({name: small_parts()[name][None]}, f"{name}: found rank")
        for name in [*INDICES, *ROWS, "custom_mask"]
    ],
    *[(cut(name, 8), rf"{name}: found shape \(8, .*expected N = 9 along axis 0") for name in ("q", "k", "v")],
    *[
        (cut(name, 8), rf"{name}: found shape \(8,.*expected N = 9")
        for name in ("out_cache_loc", "positions")
    ],
    (cut("prefix_rows", 8), "prefix_rows: found shape .*expected P = 9 along axis 0"),
    (cut("out_triton", 8), "out_triton: found shape .*expected N = 9 along axis 0"),
    ({"q": np.zeros((9, 3, 576), BF16)}, r"q: found shape \(9, 3, 576\), expected H = 2 along axis 1"),
    ({"q": np.zeros((9, 2, 512), BF16)}, "q: .*expected 576 along axis 2"),
    ({"out_triton": np.zeros((9, 512), BF16)}, r"out_triton: .*expected H\*512 = 1024 along axis 1"),
    (cut("kv_indices", 8), r"kv_indices: found 8 entries, expected at least kv_indptr\[bs\] = 9"),
    (cut("seq_lens", 1), r"seq_lens: found shape \(1,\), expected bs = 2"),
    (cut("mask_indptr", 2), r"mask_indptr: found shape \(2,\), expected bs\+1 = 3"),
    (cut("qo_indptr", 0), r"qo_indptr: found no entry, expected bs \+ 1 entries"),
    (changed("qo_indptr", 0, 1), "qo_indptr: found first entry 1, expected 0"),
    (changed("kv_indptr", 1, 10), "kv_indptr: found 10 then 9 at entry 2, expected entries that never fall"),
    (
        changed("qo_indptr", 1, 6),
        "qo_indptr: found 6 draft tokens in request 0, expected at most max_extend_len = 5",
    ),
    (changed("kv_indices", 2, -1), "kv_indices: found -1 at entry 2, expected 0 to 999"),
    (changed("kv_indices", 8, 1000), r"kv_indices: found 1000 at entry 8, .*pool_slots = 1000"),
    (changed("out_cache_loc", 8, 1000), "out_cache_loc: found 1000 at entry 8"),
    (changed("positions", 3, -2), "positions: found -2 at entry 3, expected 0 or more"),
    (changed("req_pool_indices", 0, -1), "req_pool_indices: found -1 at entry 0"),
    (
        changed("seq_lens", 1, 7),
        "seq_lens: found 7 for request 1, expected its prefix length in kv_indptr, 6",
    ),
    (changed("mask_indptr", 0, 2), "mask_indptr: found first entry 2, expected 0"),
    (changed("mask_indptr", 1, 39), "mask_indptr: found request 1 starts at 39, expected 40 or more"),
    (cut("custom_mask", 70), r"custom_mask: found 70 cells, expected at least 8\d for layout FULL_MASK"),
    (changed("v", (3, 0, 7), 9), "v: found values that differ from k"),
    (changed("tail_rows", (3, 0, 550), 9), r"tail_rows: found row 3 \(slot 503\) that differs from k"),
    (
        {"kv_indices": np.full(9, 4)},
        "prefix_rows: found two different rows for pool slot 4, expected one row a slot",
    ),
    ({"q": None}, "tensors missing: q"),
    ({"custom_mask": None, "mask_indptr": None}, "tensors missing: custom_mask, mask_indptr"),
]


@pytest.mark.parametrize(
    ("changes", "message"), BROKEN, ids=[f"{i}-{next(iter(c))}" for i, (c, _) in enumerate(BROKEN)]
)
def test_broken_tensors_are_refused(changes, message):
    with pytest.raises(CaptureError, match=message) as caught:
        build(**changes)
    assert "\n" not in str(caught.value)


def test_a_chain_with_a_mask_is_refused():
    with pytest.raises(CaptureError, match="unknown tensors: custom_mask, mask_indptr"):
        CaptureCase(name="small", meta=small_meta(mask_layout="CHAIN"), **small_parts())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sm_scale": float("nan")}, "sm_scale: found nan, expected a finite number above 0"),
        ({"sm_scale": float("inf")}, "sm_scale: found inf"),
        ({"sm_scale": 0.0}, "sm_scale: found 0"),
        ({"sm_scale": -0.1}, "sm_scale: found -0.1"),
        ({"num_heads": 0}, "num_heads: found 0, expected 1 or more"),
        ({"max_extend_len": 0}, "max_extend_len: found 0"),
        ({"pool_slots": -5}, "pool_slots: found -5"),
        ({"layer_id": -1}, "layer_id: found -1, expected 0 or more"),
        ({"mask_layout": "ROWS"}, "mask_layout: found 'ROWS', expected FULL_MASK or QLEN_ONLY or CHAIN"),
        ({"extra": {"gpu": "x"}}, "extra: found the named entries gpu"),
    ],
)
def test_broken_scalars_are_refused(changes, message):
    with pytest.raises(CaptureError, match=message):
        small_meta(**changes)


STRINGS = {key: str(value) for key, value in META.items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": "eight"}, "metadata num_heads: found 'eight', expected a number"),
        ({"sm_scale": "x"}, "metadata sm_scale: found 'x', expected a number"),
        ({"sm_scale": "nan"}, "sm_scale: found nan"),
        ({"qk_head_dim": "192"}, "metadata qk_head_dim: found 192, expected 576"),
        ({"v_head_dim": "128"}, "metadata v_head_dim: found 128, expected 512"),
        ({"page_size": "64"}, "metadata page_size: found 64, expected 1"),
        ({"logit_cap": "30.0"}, "metadata logit_cap: found 30.0, expected 0"),
        ({"logit_cap": "off"}, "metadata logit_cap: found 'off'"),
    ],
)
def test_broken_metadata_is_refused(changes, message):
    with pytest.raises(CaptureError, match=message):
        CaptureMeta.from_strings({**STRINGS, **changes})


def test_missing_metadata_is_named():
    with pytest.raises(CaptureError, match="metadata missing: layer_id, sm_scale"):
        CaptureMeta.from_strings({k: v for k, v in STRINGS.items() if k not in ("layer_id", "sm_scale")})


def test_metadata_goes_through_strings_and_back():
    meta = small_meta(
        sm_scale=0.13086079996295005, algorithm="NGRAM", gpu="a GPU", extra={"page_size": "1", "x": "y"}
    )
    assert CaptureMeta.from_strings(meta.to_strings()) == meta
