"""A NumPy model of SGLang's ``RadixCache``: prefixes shared between requests, locked while in use, evicted by age.

Keys are int64 arrays. With ``bigram`` (SGLang's ``is_eagle``) a key element codes a token and its successor, so a
sequence of n tokens has n - 1 elements and the last token's slot stays outside the tree.
Every node carries one slot an element; a node's children differ in their first element.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_glue.defrag.model_pools import NONE
from sglang_glue.defrag.runs import Slots

Key = NDArray[np.int64]


class FreesSlots(Protocol):
    """What the tree needs of an allocator."""

    def free(self, slots: Slots) -> None: ...


@dataclass(eq=False)
class Node:
    """A stretch of tokens with its slots. ``lock_ref`` counts the requests that read it."""

    key: Key
    value: Slots
    parent: Node | None
    age: int
    lock_ref: int = 0
    children: dict[int, Node] = field(default_factory=dict)

    def path(self) -> list[Node]:
        """The nodes from below the root down to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def common_prefix(a: Key, b: Key) -> int:
    """Length of the common prefix of two keys."""
    n = min(a.size, b.size)
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n


class RadixTree:
    """The cache of prefixes."""

    def __init__(self, allocator: FreesSlots, bigram: bool = False) -> None:
        self.allocator = allocator
        self.bigram = bigram
        self._clock = count(1)
        self.root = Node(NONE, NONE, None, next(self._clock), lock_ref=1)
        self._leaves: dict[int, Node] = {}
        self.evictable_size = 0
        self.protected_size = 0

    def key_of(self, tokens: NDArray[np.int64]) -> Key:
        """The key of a token sequence (token ids below 2**31)."""
        return (tokens[:-1] << 32) | tokens[1:] if self.bigram else tokens

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = list(self.root.children.values())[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(list(node.children.values())[::-1])

    def match_prefix(self, key: Key) -> tuple[Slots, Node]:
        """Slots of the longest cached prefix of ``key`` and the node it ends in; splits a node if it ends inside."""
        now = next(self._clock)
        node, values = self.root, []
        node.age = now
        while key.size and int(key[0]) in node.children:
            child = node.children[int(key[0])]
            child.age = now
            shared = common_prefix(child.key, key)
            if shared < child.key.size:
                node = self._split(child, shared)
                values.append(node.value)
                break
            values.append(child.value)
            node, key = child, key[shared:]
        return (np.concatenate(values) if values else NONE), node

    def insert(self, key: Key, value: Slots) -> int:
        """Add a sequence; returns how much of it was there already (that part of ``value`` stays the caller's)."""
        now = next(self._clock)
        node, known = self.root, 0
        node.age = now
        while key.size and int(key[0]) in node.children:
            node = node.children[int(key[0])]
            node.age = now
            shared = common_prefix(node.key, key)
            known += shared
            key, value = key[shared:], value[shared:]
            if shared < node.key.size:
                node = self._split(node, shared)
        if key.size:
            leaf = Node(key, value.copy(), node, next(self._clock))
            node.children[int(key[0])] = leaf
            self._leaves.pop(id(node), None)
            self._leaves[id(leaf)] = leaf
            self.evictable_size += key.size
        return known

    def lock(self, node: Node | None, by: int) -> None:
        """Add ``by`` (1 or -1) readers to a node and its ancestors; locked nodes are not evicted."""
        while node is not None and node.parent is not None:
            before, node.lock_ref = node.lock_ref, node.lock_ref + by
            if (before == 0) != (node.lock_ref == 0):
                moved = node.key.size if before == 0 else -node.key.size
                self.protected_size += moved
                self.evictable_size -= moved
            node = node.parent

    def evict(self, tokens: int) -> int:
        """Free at least ``tokens`` slots of the oldest unlocked leaves if there are as many; returns how many."""
        heap = [(n.age, n) for n in self._leaves.values() if n.lock_ref == 0]  # ages are distinct
        heapq.heapify(heap)
        evicted = 0
        while evicted < tokens and heap:
            _, node = heapq.heappop(heap)
            parent = node.parent
            assert parent is not None
            self.allocator.free(node.value)
            evicted += node.key.size
            del parent.children[int(node.key[0])]
            del self._leaves[id(node)]
            self.evictable_size -= node.key.size
            if not parent.children and parent is not self.root:
                self._leaves[id(parent)] = parent
                if parent.lock_ref == 0:
                    heapq.heappush(heap, (parent.age, parent))
        return evicted

    def _split(self, child: Node, at: int) -> Node:
        """Cut ``child`` after ``at`` elements; returns the new upper node."""
        parent = child.parent
        assert parent is not None
        upper = Node(child.key[:at], child.value[:at].copy(), parent, next(self._clock), child.lock_ref)
        parent.children[int(child.key[0])] = upper
        child.key, child.value, child.parent = child.key[at:], child.value[at:].copy(), upper
        upper.children[int(child.key[0])] = child
        return upper
