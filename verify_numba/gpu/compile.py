"""Kernel function -> PTX -> cubin. Needs no GPU.

The cubin is made here, by nvJitLink, and not by the driver: the toolchain's PTX version can be newer
than what the driver's own compiler accepts, while a cubin loads on every driver of the same major version.
"""

from __future__ import annotations

import re
from typing import Any

from verify_numba.gpu.artifact import Artifact
from verify_numba.gpu.spec import ComputeCapability, KernelSpec, arch

_ENTRY = re.compile(r"^\s*\.visible\s+\.entry\s+(\w+)\s*\(", re.MULTILINE)
_BOUNDS = re.compile(r"^(\.maxntid .*)$", re.MULTILINE)
_VERSION = re.compile(r"^\.version (\d+)\.(\d+)", re.MULTILINE)
_NEWEST_ACCEPTED = re.compile(r"current version is '(\d+\.\d+)'")

_STRUCT_CODES = {
    "int8": "b", "int16": "h", "int32": "i", "int64": "q",
    "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q",
    "float32": "f", "float64": "d",
}  # fmt: skip


class CompileError(RuntimeError):
    """A kernel variant that could not be compiled or assembled; names it and the architecture."""


def compile_ptx(spec: KernelSpec, cc: ComputeCapability) -> str:
    """The PTX of a variant for compute capability `cc`; CompileError where Numba cannot compile it."""
    from numba import cuda

    bounds = (spec.threads, spec.min_blocks) + ((spec.cluster,) if spec.cluster > 1 else ())
    try:
        ptx, _ = cuda.compile(
            spec.build(), spec.signature(),
            cc=cc, output="ptx", device=False, abi="numba", launch_bounds=bounds,
        )  # fmt: skip
    except Exception as error:  # Numba's own errors, and whatever breaks inside it on a bad kernel
        what = f"{type(error).__name__}: {error}"
        raise CompileError(f"kernel {spec.name} does not compile for {arch(cc)}: {what}") from error
    text = ptx if isinstance(ptx, str) else ptx.decode()
    return _limit_registers(text, spec.max_registers)


def _limit_registers(ptx: str, max_registers: int) -> str:
    """Launch bounds override the assembler's own register option, so the limit goes into the PTX."""
    if max_registers >= 255:
        return ptx
    return _BOUNDS.sub(rf"\1\n.maxnreg {max_registers}", ptx)


def entry_name(ptx: str) -> str:
    """The symbol of the one kernel in `ptx`; CompileError where there is none or more than one."""
    names = _ENTRY.findall(ptx)
    if len(names) != 1:
        raise CompileError(f"the PTX holds {len(names)} kernels, expected 1")
    return names[0]


def arg_format(signature: Any) -> str:
    """One `struct` code an argument of a tuple of numba types, or of a numba signature.

    Raises CompileError where an argument is neither integer nor float.
    """
    codes = []
    for index, numba_type in enumerate(getattr(signature, "args", signature)):
        code = _STRUCT_CODES.get(str(numba_type))
        if code is None:
            raise CompileError(
                f"argument {index} has type {numba_type}, expected one of {', '.join(_STRUCT_CODES)}"
            )
        codes.append(code)
    return "".join(codes)


def assemble(ptx: str, cc: ComputeCapability) -> bytes:
    """The cubin of `ptx` for exactly the architecture `cc`; CompileError with the assembler's message."""
    return assemble_with_log(ptx, cc)[0]


def assemble_with_log(ptx: str, cc: ComputeCapability) -> tuple[bytes, str]:
    """The cubin and the assembler's report on registers and spills.

    Where the PTX is of a newer version than this nvJitLink knows, it is declared as the newest known
    one and tried again: instructions that the older version lacks still fail, with their own message.
    """
    try:
        return _link(ptx, cc)
    except CompileError as error:
        newest = _NEWEST_ACCEPTED.search(str(error))
        if newest is None or _version_of(ptx) <= tuple(map(int, newest[1].split("."))):
            raise
        return _link(_VERSION.sub(f".version {newest[1]}", ptx, count=1), cc)


def _version_of(ptx: str) -> tuple[int, ...]:
    found = _VERSION.search(ptx)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _link(ptx: str, cc: ComputeCapability) -> tuple[bytes, str]:
    from cuda.bindings import nvjitlink

    options = [f"-arch={arch(cc)}", "-Xptxas=-v"]
    code = ptx.encode()
    handle = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, code, len(code), "kernel.ptx")
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
    except nvjitlink.nvJitLinkError as error:
        message = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, message)
        text = _text(message) or str(error)
        raise CompileError(f"nvJitLink cannot assemble for {arch(cc)}: {text}") from error
    finally:
        nvjitlink.destroy(handle)
    return bytes(cubin), _text(log)


def _text(buffer: bytearray) -> str:
    return bytes(buffer).rstrip(b"\0").decode(errors="replace").strip()


def build_artifact(spec: KernelSpec, cc: ComputeCapability) -> Artifact:
    """Compile and assemble a variant; raises CompileError."""
    ptx = compile_ptx(spec, cc)
    try:
        cubin, log = assemble_with_log(ptx, cc)
        return Artifact(spec.name, entry_name(ptx), arg_format(spec.signature()), log, ptx, cubin)
    except CompileError as error:
        raise CompileError(f"kernel {spec.name}: {error}") from error
