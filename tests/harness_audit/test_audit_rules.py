"""The audit's parts: what is counted, what is forbidden, what fits on an SM, what is missing."""

from __future__ import annotations

import dataclasses

import pytest
import toy_variants

from harness import audit_scan, audit_tools
from harness.audit_limits import LIMITS, blocks_per_sm, static_shared
from harness.audit_measure import Finding, missing, problems
from harness.audit_tools import BinaryTools, Resources, find_tools
from harness.errors import UsageError

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64] ;
        /*0020*/              @!P1 LDSM.16.MT88.4 R4, [R8] ;
        /*0030*/                   HMMA.16816.F32.BF16 R4, R4, R8, R12 ;
        /*0040*/                   HMMA.16816.F32.BF16 R4, R4, R8, R12 ;
.L_x_1:
        /*0050*/             @!UP2 UBLKCP.S.G [UR8], [UR4], UR6 ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0070*/                   SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R3], RZ ;
        /*0080*/                   STL [R1+0x90], R2                   (*"SpillRefill"*);
        /*0090*/                   STAS.128 [R6.64+0x10], R24 ;
        /*00a0*/                   MEMBAR.ALL.GPU ;
        /*00b0*/                   CCTL.IVALL ;
        /*00c0*/                   NOP ;
"""


def test_instructions_are_counted_by_opcode_whatever_predicate_and_modifiers():
    counts = audit_scan.count(audit_scan.opcodes(SASS))
    assert counts == {
        "mma": 2, "ldmatrix": 1, "cp.async": 1, "bulk": 1, "bar": 1,
        "mbar": 1, "cluster": 0, "remote": 1, "fence": 2, "local": 1, "all": 12,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1}, %rd1, %rd2;", "wgmma"),
        ("@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64;", "tcgen05"),
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile [%r1], [%rd1, {%r2, %r3}], [%r4];",
            "tensor map",
        ),
        ("cp.reduce.async.bulk.tensor.1d.global.shared::cta.add [%rd1, {%r2}], [%r1];", "tensor map"),
        ("cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%rd1, {%r1}];", "tensor map"),
        ("tensormap.replace.tile.global_address.global.b1024.b64 [%rd1], %rd2;", "tensor map"),
        ("prefetch.tensormap [%rd1];", "tensor map"),
        ("setmaxnreg.inc.sync.aligned.u32 240;", "setmaxnreg"),
        (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1];",
            "multicast",
        ),
    ],
)
def test_forbidden_ptx_is_found(line, kind):
    assert audit_scan.forbidden_in_ptx(f"mov.u32 %r1, %tid.x;\n\t{line}\n") == [kind]


@pytest.mark.parametrize(
    "line",
    [
        "// wgmma.mma_async and tcgen05.mma in a comment",
        "/* setmaxnreg.inc\n cp.async.bulk.tensor.1d */",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 1152, [%r2];",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};",
        ".visible .entry _Z7wgmma_tcgen05_multicast_kernel(",
    ],
)
def test_allowed_ptx_is_not(line):
    assert audit_scan.forbidden_in_ptx(line) == []


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("HGMMA.64x8x16.F32.BF16", "wgmma"),
        ("UTCHMMA", "tcgen05"),
        ("LDTM.x32", "tcgen05"),
        ("UTMALDG.2D", "tensor map"),
        ("USETMAXREG.TRY_ALLOC", "setmaxnreg"),
        ("UBLKCP.S.G.MULTICAST", "multicast"),
    ],
)
def test_forbidden_machine_code_is_found(opcode, kind):
    assert audit_scan.forbidden_in_sass(["MOV", opcode]) == [kind]


def test_allowed_machine_code_is_not():
    assert (
        audit_scan.forbidden_in_sass(audit_scan.opcodes(SASS) + ["UTMACMDFLUSH", "LDTRAM", "STS.128"]) == []
    )


@pytest.mark.parametrize(
    ("cc", "threads", "registers", "shared", "blocks"),
    [
        ((9, 0), 256, 32, 0, 8),  # threads
        ((12, 0), 256, 32, 0, 6),
        ((9, 0), 32, 16, 0, 32),  # blocks
        ((12, 0), 32, 16, 0, 24),
        ((9, 0), 256, 255, 0, 1),  # registers
        ((9, 0), 256, 128, 0, 2),
        ((9, 0), 256, 129, 0, 1),
        ((12, 0), 256, 64, 101_376, 1),  # shared memory, with the system's 1 KiB a block
        ((12, 0), 256, 64, 101_377, 0),
        ((12, 0), 128, 64, 50_176, 2),
        ((12, 0), 128, 64, 50_177, 1),
        ((9, 0), 128, 64, 115_712, 2),
        ((9, 0), 128, 64, 232_448, 1),
        ((8, 0), 128, 64, 166_912, 1),
        ((8, 0), 128, 64, 166_913, 0),
    ],
)
def test_blocks_that_fit_on_an_sm(cc, threads, registers, shared, blocks):
    assert blocks_per_sm(cc, threads, registers, shared) == blocks


def test_the_largest_block_of_sm_120_is_the_one_that_is_documented():
    assert LIMITS[(12, 0)].smem_block == 101_376


def test_the_systems_shared_memory_is_not_the_kernels():
    assert static_shared((8, 6), 384) == 384
    assert static_shared((9, 0), 1408) == 384
    assert static_shared((12, 0), 0) == 0


CLEAN = Finding("clean", (12, 0), counts={"local": 0}, smem_limit=101_376, blocks_per_sm=2, registers=100)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spill_stores": 4}, "spills: 4 B stored"),
        ({"spill_loads": 8}, "8 B loaded"),
        ({"local": 16}, "local memory: 16 B a thread"),
        ({"counts": {"local": 3}}, "local memory: 0 B a thread, 3 instructions"),
        ({"registers": 256}, "256 registers, more than the 255"),
        ({"static_smem": 1000, "dynamic_smem": 101_000}, "102,000 B of shared memory, a block has 101,376 B"),
        ({"blocks_per_sm": 0}, "0 blocks fit on an SM, its spec wants 1"),
        ({"forbidden": ["wgmma"]}, "forbidden instruction: wgmma"),
    ],
)
def test_every_rule_is_a_problem_of_its_own(change, words):
    assert problems(CLEAN, toy_variants.CLEAN) == []
    (found,) = problems(dataclasses.replace(CLEAN, **change), toy_variants.CLEAN)
    assert words in found


def test_before_9_0_a_spill_is_shown_and_no_failure():
    spilling = dataclasses.replace(CLEAN, spill_stores=4, local=16)
    assert problems(dataclasses.replace(spilling, cc=(8, 9)), toy_variants.CLEAN) == []
    assert len(problems(dataclasses.replace(spilling, cc=(9, 0)), toy_variants.CLEAN)) == 2


def test_a_form_without_clusters_is_needed_everywhere_and_one_with_from_9_0_on():
    single, pair = toy_variants.CLEAN, toy_variants.CLUSTER
    assert missing([single, pair], (8, 6)) == missing([single, pair], (12, 0)) == []
    assert missing([single], (8, 9)) == []
    assert missing([single], (9, 0)) == ["sm_90: no variant with clusters"]
    assert missing([pair], (12, 0)) == ["sm_120: no variant without clusters"]
    assert missing([pair], (8, 0)) == ["sm_80: no variant without clusters"]


@pytest.fixture
def no_tools(monkeypatch):
    monkeypatch.setattr(audit_tools, "_package_folders", lambda package, pattern: [])
    monkeypatch.setenv("PATH", "")


def test_absent_tools_are_named_with_the_way_to_get_them(no_tools):
    with pytest.raises(UsageError, match="cuobjdump is not installed: `pip install nvidia-cuda-cuobjdump"):
        find_tools()


def test_tools_are_found_on_path_as_a_last_resort(no_tools, monkeypatch, tmp_path):
    for name in ("cuobjdump", "nvdisasm"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_tools() == BinaryTools(str(tmp_path / "cuobjdump"), str(tmp_path / "nvdisasm"))


def test_a_tool_that_fails_is_quoted(tmp_path):
    tool = tmp_path / "nvdisasm"
    tool.write_text("#!/bin/sh\necho 'unknown architecture sm_120' >&2\nexit 3\n")
    tool.chmod(0o755)
    with pytest.raises(UsageError, match=r"nvdisasm -c .*failed: unknown architecture sm_120"):
        BinaryTools(str(tool), str(tool)).sass(b"\x7fELF")


USAGE = """
Resource usage:
 Common:
  GLOBAL:8
 Function slow_path:
  REG:12 STACK:16 SHARED:0 LOCAL:0 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function kernel:
  REG:255 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:592 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


@pytest.fixture
def saying_tool(tmp_path):
    """A cuobjdump that prints USAGE whatever it is given."""
    tool = tmp_path / "cuobjdump"
    (tmp_path / "usage.txt").write_text(USAGE)
    tool.write_text(f"#!/bin/sh\ncat {tmp_path}/usage.txt\n")
    tool.chmod(0o755)
    return BinaryTools(str(tool), str(tool))


def test_the_routines_a_kernel_calls_count_with_it(saying_tool):
    assert saying_tool.resources(b"\x7fELF", "kernel") == Resources(
        registers=255, stack=16, shared=1024, local=0
    )


def test_a_tool_that_does_not_describe_the_kernel_is_refused(saying_tool):
    with pytest.raises(UsageError, match="says nothing of kernel other"):
        saying_tool.resources(b"\x7fELF", "other")
