"""What stands in the code of a kernel: instruction counts, and instructions that sm_120 does not have."""

from __future__ import annotations

import re
from collections import Counter

_PTX_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FORBIDDEN_PTX = (
    ("wgmma", re.compile(r"\bwgmma\.")),
    ("tcgen05", re.compile(r"\btcgen05\.")),
    ("tensor map", re.compile(r"\btensormap\.|\.tensormap\b|\bcp\.\S*async\.bulk\.\S*tensor\b")),
    ("setmaxnreg", re.compile(r"\bsetmaxnreg\.")),
    ("multicast", re.compile(r"\.multicast\b")),
)
_FORBIDDEN_SASS = (
    ("wgmma", re.compile(r"[HIQB]GMMA(\.|$)|WARPGROUP")),
    ("tcgen05", re.compile(r"UTC|LDTM|STTM|LDT(\.|$)|STT(\.|$)")),
    ("tensor map", re.compile(r"UTMA(LDG|STG|REDG|PF)")),
    ("setmaxnreg", re.compile(r"USETMAXREG")),
    ("multicast", re.compile(r".*\.MULTICAST")),
)
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)

COUNTED: dict[str, tuple[str, ...]] = {
    "mma": ("HMMA",),
    "ldmatrix": ("LDSM",),
    "cp.async": ("LDGSTS",),
    "bulk": ("UBLKCP",),
    "bar": ("BAR",),
    "mbar": ("SYNCS",),
    "cluster": ("UCGABAR_ARV", "UCGABAR_WAIT"),
    "remote": ("STAS",),
    "fence": ("MEMBAR", "CCTL", "CCTLL"),
    "local": ("LDL", "STL"),
}
"""Columns of the report by the SASS opcodes they count: matrix steps, matrix loads, copies into shared
memory by 16 bytes and in bulk, block barriers, mbarrier operations, cluster barriers, stores into the
partner's shared memory, fences with their cache invalidations, local memory."""


def opcodes(sass: str) -> list[str]:
    """Every instruction of the disassembly, as opcode with modifiers: `HMMA.16816.F32.BF16`."""
    return _INSTRUCTION.findall(sass)


def count(codes: list[str]) -> dict[str, int]:
    """Instructions in the code (not executions) by column of `COUNTED`, and `all` but the padding."""
    bases = Counter(code.split(".")[0] for code in codes)
    every = len(codes) - bases["NOP"]
    return {name: sum(bases[base] for base in of) for name, of in COUNTED.items()} | {"all": every}


def forbidden_in_ptx(ptx: str) -> list[str]:
    """Kinds of forbidden instructions in the PTX; comments do not count."""
    code = _PTX_COMMENT.sub("", ptx)
    return [kind for kind, pattern in _FORBIDDEN_PTX if pattern.search(code)]


def forbidden_in_sass(codes: list[str]) -> list[str]:
    """Kinds of forbidden instructions in the machine code."""
    return [kind for kind, pattern in _FORBIDDEN_SASS if any(pattern.match(code) for code in codes)]
