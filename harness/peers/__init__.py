"""Other people's kernels for the same work, timed beside ours in the same run.

A peer that cannot run says why; it is never left out silently.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.errors import UsageError
from harness.peers.base import Contender, Peer, PeerRefused
from harness.peers.flashinfer_mla import FlashInfer
from harness.peers.flashmla import FlashMLA
from harness.peers.sglang_chain import SGLangSharedKV, SGLangSplitKV
from harness.peers.sglang_triton import SGLangTriton
from harness.peers.torch_dense import TorchDense

__all__ = ["PEERS", "Contender", "Peer", "PeerRefused", "choose_peers"]

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


def choose_peers(text: str) -> Sequence[Peer]:
    """`all`, `none` or names separated by commas. Raises UsageError for a name that is not in PEERS."""
    if text == "all":
        return tuple(PEERS.values())
    if text == "none":
        return ()
    names = text.split(",")
    for name in names:
        if name not in PEERS:
            raise UsageError(f"--peers: {name!r} is unknown; there are all, none, {', '.join(PEERS)}")
    return tuple(PEERS[name] for name in names)
