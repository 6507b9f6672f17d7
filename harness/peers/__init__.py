"""Other people's kernels for the same work, timed beside ours in the same run.

A peer that cannot run says why; it is never left out silently.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from harness.errors import UsageError
from harness.peers.base import Contender, Peer, PeerRefused
from harness.peers.flashinfer_mla import FlashInfer
from harness.peers.flashmla import FlashMLA
from harness.peers.sglang_chain import SGLangSharedKV, SGLangSplitKV
from harness.peers.sglang_triton import SGLangTriton
from harness.peers.torch_dense import TorchDense

__all__ = ["PEERS", "Contender", "Peer", "PeerRefused", "choose_peers", "find_peer"]

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        SGLangTriton(),
        SGLangSplitKV(),
        SGLangSharedKV(),
        FlashInfer("fa2"),
        FlashInfer("fa3"),
        FlashMLA(),
        TorchDense(),
    )
}
"""Every peer by the name used on the command line and in results."""


def choose_peers(text: str) -> Sequence[str]:
    """`all`, `none` or names separated by commas. Raises UsageError for a name that is no peer."""
    if text in ("all", "none"):
        return tuple(PEERS) if text == "all" else ()
    names = text.split(",")
    for name in names:
        find_peer(name)
    return tuple(names)


def find_peer(name: str) -> Peer:
    """A peer of PEERS, or any other: `package.module:attribute` names a Peer, or a class that makes one.

    Raises UsageError where there is none.
    """
    if name in PEERS:
        return PEERS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UsageError(f"--peers: {name!r} is unknown; there are all, none, package.module:name, {', '.join(PEERS)}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--peers: {name!r} cannot be imported: {error}") from error
    peer: Peer = found() if isinstance(found, type) else found
    return peer
