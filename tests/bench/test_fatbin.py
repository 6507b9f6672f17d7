import pytest

from harness.fatbin import MAGIC, Target, read_modules
from tests.bench.fatbins import NOISE, SASS_90A, SASS_120A, container, entry, with_payload


def read(tmp_path, data):
    path = tmp_path / "library.so"
    path.write_bytes(data)
    return read_modules(path)


def test_entries_of_a_released_library(tmp_path):
    (module,) = read(tmp_path, NOISE + container(with_payload(SASS_90A), with_payload(SASS_120A)))
    assert {str(target) for target in module} == {"9.0a", "12.0a"}
    assert not any(target.ptx for target in module)


def test_one_module_for_each_container(tmp_path):
    data = NOISE + container(entry(2, 80), entry(1, 90)) + NOISE + container(entry(2, 103, "f"))
    first, second = read(tmp_path, data)
    assert first == {Target((8, 0), "", False), Target((9, 0), "", True)}
    assert second == {Target((10, 3), "f", False)}


def test_the_magic_by_chance_is_no_container(tmp_path):
    (module,) = read(tmp_path, MAGIC + b"\xff" * 12 + MAGIC + NOISE + container(entry(2, 120)))
    assert module == {Target((12, 0), "", False)}


@pytest.mark.parametrize("data", [b"", NOISE, MAGIC, container(), container(entry(2, 90))[:-5]])
def test_nothing_to_read(tmp_path, data):
    assert read(tmp_path, data) == []


def test_a_header_of_size_zero_does_not_hang(tmp_path):
    assert read(tmp_path, container(b"\0" * 64)) == []


@pytest.mark.parametrize(
    ("target", "runs", "does_not"),
    [
        (Target((8, 0), "", False), [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0), (12, 0)]),
        (Target((8, 6), "", False), [(8, 6), (8, 9)], [(8, 0)]),
        (Target((9, 0), "a", False), [(9, 0)], [(8, 9), (10, 0), (12, 0)]),
        (Target((12, 0), "a", False), [(12, 0)], [(12, 1)]),
        (Target((10, 0), "f", False), [(10, 0), (10, 3)], [(12, 0), (9, 0)]),
        (Target((8, 0), "", True), [(8, 0), (9, 0), (12, 0)], [(7, 5)]),
        (Target((9, 0), "a", True), [(9, 0)], [(10, 0), (12, 0)]),
        (Target((12, 0), "f", True), [(12, 0), (12, 1)], [(10, 3)]),
    ],
)
def test_what_runs_where(target, runs, does_not):
    assert all(target.runs_on(cc) for cc in runs)
    assert not any(target.runs_on(cc) for cc in does_not)
