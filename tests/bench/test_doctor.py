import json

import pytest

from harness import doctor_gpu, doctor_libraries, doctor_report, doctor_serving
from harness.cli import main
from harness.doctor_conflicts import PROBLEM, WARNING, Machine, find_conflicts, numbers
from harness.doctor_gpu import Gpus, can_run, driver_version
from harness.doctor_libraries import find_libraries
from harness.doctor_serving import look_at_serving
from tests.bench.fatbins import container, entry
from verify_numba.gpu.driver import CudaUnavailable, GpuInfo

GOOD = {"numpy": "2.4.6", "numba": "0.68.1", "numba-cuda": "0.30.4", "torch": "2.11.0+cu130"}


def gpu(cc, smem=101_376):
    return GpuInfo(
        ordinal=0, name="GPU", cc=cc, sm_count=188, smem_block=smem, smem_sm=smem, l2_bytes=1 << 27
    )


@pytest.fixture
def no_gpu(monkeypatch):
    def unavailable():
        raise CudaUnavailable("no NVIDIA driver on this machine")

    monkeypatch.setattr(doctor_gpu, "get_driver", unavailable)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with one library for Hopper and one with PTX for everything from 8.0 on."""
    folder = tmp_path / "site" / "flash_mla"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    (folder / "hopper.so").write_bytes(
        container(entry(2, 90, "a")) + container(entry(2, 90, "a"), entry(1, 80))
    )
    (folder / "host.so").write_bytes(b"no device code")
    (folder / "gone.so").symlink_to(folder / "nowhere.so")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setattr(doctor_libraries, "PACKAGES", ("flash_mla", "nowhere_to_be_found"))
    return folder


def levels(versions, **machine):
    found = find_conflicts(Machine(GOOD | versions, python=(3, 12), **machine))
    return [(finding.level, finding.text) for finding in found]


def test_a_good_set_of_versions_has_no_finding():
    assert levels({}, has_gpu=True, driver_cuda=(13, 0)) == []
    assert levels({"sglang": "0.5.17", "sglang-kernel": "0.4.5", "transformers": "5.12.1"}) == []


@pytest.mark.parametrize(
    ("versions", "machine", "level", "text"),
    [
        ({"numpy": "2.5.0rc1"}, {}, PROBLEM, "install numpy<2.5"),
        ({"numba-cuda": None}, {"has_gpu": True}, PROBLEM, "numba-cuda is not installed"),
        ({"numba-cuda": None}, {}, WARNING, "CPU only"),
        ({"torch": "2.13.0+cpu"}, {"has_gpu": True}, PROBLEM, "without CUDA"),
        ({"torch": None}, {"has_gpu": True}, WARNING, "torch is not installed"),
        ({"cuda-bindings": "13.0.1"}, {"driver_cuda": (12, 8)}, PROBLEM, "driver 580"),
        ({"sglang": "0.5.16"}, {}, WARNING, "0.5.16 is not tested"),
        ({"sglang": "0.5.17", "sglang-kernel": "0.4.4"}, {}, WARNING, "pins sglang-kernel 0.4.5"),
        ({"sglang": "0.5.17", "transformers": "5.17.0"}, {}, PROBLEM, "breaks the import"),
    ],
)
def test_each_conflict_is_found(versions, machine, level, text):
    ((found_level, found_text),) = levels(versions, **machine)
    assert found_level == level and text in found_text


def test_problems_come_first():
    found = levels({"sglang": "0.1", "numpy": "2.6"})
    assert [level for level, _ in found] == [PROBLEM, WARNING]


@pytest.mark.parametrize(
    ("version", "parts"),
    [("2.4.0rc1", (2, 4, 0)), ("2.11.0+cu130", (2, 11, 0)), ("0.6.15.post1", (0, 6, 15))],
)
def test_numbers(version, parts):
    assert numbers(version) == parts


@pytest.mark.parametrize(
    ("cc", "lines"),
    [
        ((7, 5), ["no kernel: compute capability 7.5, at least 8.0"]),
        ((8, 6), ["without clusters: yes", "cluster form: no, compute capability 9.0"]),
        ((12, 0), ["without clusters: yes", "cluster form: yes, they take up to"]),
    ],
)
def test_what_a_gpu_can_run(cc, lines):
    for found, expected in zip(can_run(gpu(cc)), lines, strict=True):
        assert expected in found


def test_too_little_shared_memory_is_said():
    single, _ = can_run(gpu((8, 0), smem=49_152))
    assert "without clusters: 0 of " in single


def test_driver_version(tmp_path):
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    assert driver_version(file) == "580.65.06"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n")
    assert driver_version(file) == "550.54.15"
    assert driver_version(tmp_path / "none") is None


def test_libraries_are_read_without_importing_them(package):
    libraries, reasons = find_libraries()
    assert [(lib.package, lib.file, len(lib.modules)) for lib in libraries] == [("flash_mla", "hopper.so", 2)]
    assert reasons == {"nowhere_to_be_found": "not installed"}


def test_verdicts(package):
    ((library,), _) = find_libraries()
    assert library.coverage((9, 0)) == {"sass": 2, "ptx": 0, "none": 0}
    assert library.coverage((12, 0)) == {"sass": 0, "ptx": 1, "none": 1}
    assert library.verdict((12, 0)) == "PTX only, 1 of 2 modules"
    assert library.verdict((7, 5)) == "no code for it"


def test_kernels_that_flashinfer_compiled_here_are_found(package, tmp_path):
    cache = tmp_path / ".cache" / "flashinfer" / "0.6" / "90a"
    cache.mkdir(parents=True)
    (cache / "mla.so").write_bytes(container(entry(2, 90, "a")))
    libraries, _ = find_libraries()
    assert libraries[-1].package == "flashinfer, compiled here"
    assert libraries[-1].file.endswith("mla.so")


def test_the_mode_and_a_bad_one(monkeypatch):
    monkeypatch.setenv("KDTREE_VERIFY", "validate")
    assert look_at_serving().mode == "validate"
    monkeypatch.setenv("KDTREE_VERIFY", "maybe")
    assert "off, validate, on" in str(look_at_serving().settings_error)


def test_the_plug_in_is_found_by_its_target(monkeypatch):
    class Entry:
        def __init__(self, name, value):
            self.name, self.value = name, value

    entries = [Entry("kdtree", "sglang_glue.plugin:register"), Entry("x", "other:register")]
    monkeypatch.setattr(doctor_serving, "entry_points", lambda group: entries)
    serving = look_at_serving()
    assert serving.entry == "kdtree = sglang_glue.plugin:register"
    assert serving.others == ["x = other:register"]


def test_text_without_a_gpu(no_gpu, package, capsys):
    assert main(["doctor", "--cc", "12.0"]) == 0
    out = capsys.readouterr().out
    for text in ("no NVIDIA driver", "on 12.0: PTX only", "nowhere_to_be_found: not installed", "mode: off"):
        assert text in out


def test_json_without_a_gpu(no_gpu, package, capsys):
    assert main(["doctor", "--json", "-", "--cc", "9.0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"] == [] and "driver" in found["no_gpu"]
    assert found["libraries"][0]["coverage"] == {"9.0": {"sass": 2, "ptx": 0, "none": 0}}
    assert found["serving"]["mode"] == "off"


def test_an_old_gpu_is_a_problem(monkeypatch, package, capsys):
    monkeypatch.setattr(doctor_report, "find_gpus", lambda: Gpus([gpu((7, 5))], "", "580.1", (13, 0)))
    assert main(["doctor"]) == 1
    assert "problem: GPU: no kernel: compute capability 7.5" in capsys.readouterr().out


def test_a_new_gpu_is_described(monkeypatch, package, capsys):
    monkeypatch.setattr(doctor_report, "find_gpus", lambda: Gpus([gpu((12, 0))], "", "580.1", (13, 0)))
    main(["doctor"])
    assert "shared memory 101,376 B a block" in capsys.readouterr().out


def test_a_bad_setting_is_a_problem(no_gpu, package, monkeypatch, capsys):
    monkeypatch.setenv("KDTREE_VERIFY", "maybe")
    assert main(["doctor"]) == 1
    assert "problem: KDTREE_VERIFY='maybe'" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["12", "sm_120", "12.0a"])
def test_a_bad_compute_capability(text, capsys):
    assert main(["doctor", "--cc", text]) == 2
    assert "--cc" in capsys.readouterr().err
