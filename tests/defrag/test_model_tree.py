"""The model of the radix cache: sharing, locking, eviction by age."""

from __future__ import annotations

import numpy as np

from sglang_glue.defrag.model_cache import ModelCache, ModelReq
from sglang_glue.defrag.model_pools import TokenAllocator
from sglang_glue.defrag.model_tree import RadixTree, common_prefix


def key(*tokens: int):  # type: ignore[no-untyped-def]
    return np.array(tokens, np.int64)


def test_common_prefix() -> None:
    assert common_prefix(key(1, 2, 3), key(1, 2, 4)) == 2
    assert common_prefix(key(1, 2), key(1, 2, 4)) == 2
    assert common_prefix(key(), key(1)) == 0
    assert common_prefix(key(5), key(1)) == 0


def test_a_second_insert_keeps_the_first_slots() -> None:
    tree = RadixTree(TokenAllocator(20))
    assert tree.insert(key(1, 2, 3, 4), key(11, 12, 13, 14)) == 0
    assert tree.insert(key(1, 2, 9), key(15, 16, 17)) == 2, (
        "two were known; their new slots stay the caller's"
    )
    slots, _ = tree.match_prefix(key(1, 2, 9, 9))
    assert slots.tolist() == [11, 12, 17]
    assert (tree.evictable_size, tree.protected_size) == (5, 0)


def test_a_match_inside_a_node_splits_it() -> None:
    tree = RadixTree(TokenAllocator(20))
    tree.insert(key(1, 2, 3, 4), key(11, 12, 13, 14))
    slots, node = tree.match_prefix(key(1, 2, 8))
    assert slots.tolist() == [11, 12] == node.value.tolist()
    assert [n.value.tolist() for n in tree.nodes()] == [[11, 12], [13, 14]]


def test_the_oldest_unlocked_leaf_goes_first() -> None:
    allocator = TokenAllocator(20)
    taken = allocator.alloc(20)
    assert taken is not None
    tree = RadixTree(allocator)
    tree.insert(key(1, 2), key(1, 2))
    tree.insert(key(3, 4), key(3, 4))
    tree.insert(key(5, 6), key(5, 6))
    tree.match_prefix(key(1, 2))
    _, locked = tree.match_prefix(key(3, 4))
    tree.lock(locked, 1)
    assert tree.evict(1) == 2
    assert allocator.all_free().tolist() == [5, 6]
    assert tree.evict(100) == 2, "a locked node is not evicted"
    assert sorted(allocator.all_free().tolist()) == [1, 2, 5, 6]
    tree.lock(locked, -1)
    assert tree.evict(100) == 2
    assert (tree.evictable_size, tree.protected_size) == (0, 0)


def test_a_parent_is_evicted_after_its_children() -> None:
    allocator = TokenAllocator(20)
    allocator.alloc(20)
    tree = RadixTree(allocator)
    tree.insert(key(1, 2, 3), key(1, 2, 3))
    tree.insert(key(1, 2, 4), key(9, 9, 4))
    assert tree.evict(4) == 4
    assert sorted(allocator.all_free().tolist()) == [1, 2, 3, 4]


def test_a_bigram_key_leaves_the_last_slot_outside() -> None:
    cache = ModelCache(TokenAllocator(20), 4, 20, bigram=True)
    req = ModelReq(np.arange(6), known=6)
    cache.match(req)
    assert cache.admit(req) and cache.grow([req], [6])
    req.committed = 6
    cache.share(req)
    assert req.protected == 5 and cache.tree.protected_size == 5
    cache.finish(req)
    assert cache.allocator.available_size() == 15 and cache.tree.evictable_size == 5


def test_requests_share_slots_and_the_duplicate_is_freed() -> None:
    cache = ModelCache(TokenAllocator(40), 4, 20)
    first, second = (ModelReq(np.arange(10), known=10) for _ in range(2))
    for req in (first, second):
        cache.match(req)
        assert cache.admit(req)
    assert cache.grow([first, second], [10, 10]), "both prefill the same prompt at once"
    first.committed = second.committed = 10
    cache.share(first)
    cache.share(second)
    assert np.array_equal(cache.slots_of(first, 0, 10), cache.slots_of(second, 0, 10))
    assert cache.allocator.available_size() == 30
