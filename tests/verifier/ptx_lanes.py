"""Runs PTX without branches for one lane, so that addresses and bytes of an operation can be seen without a GPU.

Integers are computed. Floats are symbols: whatever was given as a parameter, `Loaded` from shared memory where nothing
is said to lie there, `Sum`, `Product` or `Pair` of others.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

STATEMENT = re.compile(r"(?:@(?P<unless>!?)(?P<guard>%?\w+)\s+)?(?P<op>[a-z][\w.:]*)\s*(?P<operands>.*)", re.DOTALL)
ADDRESS = re.compile(r"\[(%?\w+)(?:\+(\d+))?\]")
ZERO, ONE = 0.0, 1.0
WORD = 4


@dataclass(frozen=True)
class Loaded:
    """The word at this address of shared memory."""

    address: int


@dataclass(frozen=True)
class Sum:
    terms: tuple[Any, ...]


@dataclass(frozen=True)
class Product:
    factors: frozenset[Any]


@dataclass(frozen=True)
class Pair:
    """Two bf16 numbers in one word, the one of the lower address first."""

    low: Any
    high: Any


@dataclass
class Effects:
    """What lanes did: words by their address, each written once, and bytes that a barrier is to expect."""

    stored: dict[int, Any] = field(default_factory=dict)
    sent: dict[int, Any] = field(default_factory=dict)
    counted_at: set[int] = field(default_factory=set)
    """Barriers that count what is sent."""
    expected: list[int] = field(default_factory=list)
    arrivals: int = 0
    loaded: set[int] = field(default_factory=set)
    """Addresses of the words that were read."""

    def put(self, words: dict[int, Any], address: int, values: Sequence[Any]) -> None:
        if address % (WORD * len(values)):
            raise ValueError(f"{len(values)} words at {address}: misaligned")
        for i, value in enumerate(values):
            if address + WORD * i in words:
                raise ValueError(f"the word at {address + WORD * i} is written twice")
            words[address + WORD * i] = value


def run_warp(
    ptx: str, args: Callable[[int], Sequence[Any]], shared: Mapping[int, Any] = MappingProxyType({})
) -> Effects:
    """Runs a kernel's PTX in 32 lanes; `args(lane)` are its parameters, each element of a tile one of them, and
    `shared` the words of shared memory by their address."""
    effects = Effects()
    for lane in range(32):
        _Lane(lane, args(lane), effects, shared).run(ptx)
    return effects


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "min": min,
}
COMPARE = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "gt": operator.gt}
IGNORED = ("bar.warp.sync", "ret")


class _Lane:
    def __init__(self, lane: int, args: Sequence[Any], effects: Effects, shared: Mapping[int, Any]) -> None:
        self.registers: dict[str, Any] = {"%laneid": lane}
        self.args, self.effects, self.shared = args, effects, shared

    def run(self, ptx: str) -> None:
        body = re.sub(r"//.*", "", ptx[ptx.index("{") + 1 : ptx.rindex("}")])
        # A brace opens a scope unless a list of registers is in it.
        for text in re.sub(r"\{(?!%)|(?<![\w])\}", " ", body).split(";"):
            statement = STATEMENT.fullmatch(text.strip())
            if statement is None:
                if text.strip() and not text.strip().startswith(".reg"):
                    raise ValueError(f"not understood: {text.strip()}")
            elif statement["guard"] is None or self.value(statement["guard"]) != bool(statement["unless"]):
                self.step(statement["op"].split("."), statement["operands"])

    def value(self, text: str) -> Any:
        if text.startswith("0f"):
            return {"0f00000000": ZERO, "0f3F800000": ONE}[text]
        return int(text) if re.fullmatch(r"-?\d+", text) else self.registers[text]

    def address(self, text: str) -> int:
        found = ADDRESS.fullmatch(text)
        if found is None:
            raise ValueError(f"not an address: {text}")
        return int(self.value(found[1])) + int(found[2] or 0)

    def step(self, op: list[str], text: str) -> None:
        operands = [part.strip() for part in re.findall(r"\{[^}]*\}|[^,{]*[^,{\s]", text)]
        lists = [part.strip("{} ").split(",") for part in operands]
        name = ".".join(op)
        if name in IGNORED:
            return
        if op[:2] == ["ld", "param"]:
            self.registers[operands[0]] = self.args[int(re.search(r"_param_(\d+)", text)[1])]
        elif op[:2] == ["ld", "shared"]:
            at = self.address(operands[1])
            for i, register in enumerate(lists[0]):
                address = at + WORD * i
                self.registers[register.strip()] = self.shared.get(address, Loaded(address))
                self.effects.loaded.add(address)
        elif op[:2] in (["st", "shared"], ["st", "async"]):
            values = [self.value(register.strip()) for register in lists[1]]
            words = self.effects.stored if op[1] == "shared" else self.effects.sent
            self.effects.put(words, self.address(operands[0]), values)
            if op[1] == "async":
                self.effects.counted_at.add(self.address(operands[2]))
        elif op[:2] == ["mbarrier", "arrive"]:
            self.effects.arrivals += 1
            if "expect_tx" in op:
                self.effects.expected.append(self.value(operands[2]))
        else:
            self.registers[operands[0]] = self.result(op, [self.value(operand) for operand in operands[1:]])

    def result(self, op: list[str], v: list[Any]) -> Any:
        if op[0] == "mov":
            return v[0]
        if op[0] == "selp":
            return v[0] if v[2] else v[1]
        if op[0] == "setp":
            return COMPARE[op[1]](*v)
        if op[0] == "cvt" and "bf16x2" in op:
            return Pair(v[1], v[0])
        if op[-1] == "f32" and op[0] == "add":
            return Sum(tuple(v))
        if op[-1] == "f32" and op[0] == "mul":
            return Product(frozenset(v))
        if op[0] == "vote":
            return v[0]  # of this lane alone
        if op[0] == "mad":
            return v[0] * v[1] + v[2]
        return BINARY[op[0]](*v)
