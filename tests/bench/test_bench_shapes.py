import pytest

from harness.bench_shapes import (
    PRESETS,
    BenchShape,
    check_shape,
    int_list,
    run_length_of,
    slots_name,
    sweep,
    with_slots,
)
from harness.errors import UsageError


def test_every_preset_is_within_what_the_kernels_cover():
    for shapes in PRESETS.values():
        for shape in shapes:
            check_shape(shape)


def test_targets_hold_both_ends_of_the_table():
    shapes = PRESETS["targets"]
    assert BenchShape((185000,), T=9, H=8) in shapes
    assert BenchShape((65536,), T=1, H=8) in shapes
    assert BenchShape((16384,) * 8, T=9, H=8) in shapes


def test_sweep_is_the_whole_product():
    shapes = sweep(H=[8, 16], T=[1, 9], bs=[1, 2], L=[0, 4096])
    assert len(set(shapes)) == 16
    assert shapes[1] == BenchShape((4096,), T=1, H=8)


def test_with_slots_keeps_shapes_together():
    shapes = with_slots([BenchShape((10,), 9, 8), BenchShape((20,), 9, 8)], [1, 0])
    assert [(s.lengths, s.slots) for s in shapes] == [
        ((10,), "scattered"),
        ((10,), "contiguous"),
        ((20,), "scattered"),
        ((20,), "contiguous"),
    ]


@pytest.mark.parametrize(
    ("lengths", "label"),
    [
        ((65536,), "65536"),
        ((16384,) * 8, "8x16384"),
        ((100_000, *(1000,) * 7), "100000+7x1000"),
        ((1, 2, 3, 4, 5), "5 mixed, 15 in all"),
    ],
)
def test_length_label(lengths, label):
    assert BenchShape(lengths, 9, 8).length_label == label


@pytest.mark.parametrize(("text", "values"), [("1,9", [1, 9]), ("4k, 185000", [4096, 185000]), ("0", [0])])
def test_int_list(text, values):
    assert int_list(text, "--L") == values


@pytest.mark.parametrize("text", ["", "4,", "four", "-1", "1.5", "k"])
def test_int_list_names_the_option(text):
    with pytest.raises(UsageError, match="--L"):
        int_list(text, "--L")


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (BenchShape((1,), T=65, H=8), "T"),
        (BenchShape((1,), T=0, H=8), "T"),
        (BenchShape((1,), T=9, H=129), "H"),
        (BenchShape((1 << 25,), T=9, H=8), "L"),
        (BenchShape((), T=9, H=8), "bs"),
    ],
)
def test_a_shape_outside_is_refused_by_name(shape, name):
    with pytest.raises(UsageError, match=f"^{name}: "):
        check_shape(shape)


@pytest.mark.parametrize("text", ["scattered", "contiguous", "16"])
def test_run_length_round_trip(text):
    assert slots_name(run_length_of(text)).endswith(text)


@pytest.mark.parametrize("text", ["1", "0", "-3", "random"])
def test_run_length_refused(text):
    with pytest.raises(UsageError, match="--slots"):
        run_length_of(text)
