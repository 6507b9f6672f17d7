"""The peers' bindings against stand-ins that compute attention in torch from the arguments they are given."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from harness.bench_check import judge
from harness.bench_measure import References
from harness.errors import UsageError
from harness.peers import PEERS, choose_peers, find_peer
from harness.peers import flashinfer_mla as flashinfer_peer
from harness.peers import flashmla as flashmla_peer
from harness.peers import sglang_triton as sglang_peer
from harness.peers.base import PeerRefused
from harness.peers.sglang_source import load_kernel_module
from tests.bench.conftest import CPU, small_work


def attend(q, keys, visible, scale):
    """q [T, H, 576], keys [K, 576], visible [T, K] bool -> [T, H, 512] bf16."""
    T, H, _ = q.shape
    scores = (q.reshape(T * H, -1).float() @ keys.float().T) * scale
    scores = scores.masked_fill(~visible.repeat_interleave(H, dim=0), -torch.inf)
    return (torch.softmax(scores, -1) @ keys[:, :512].float()).view(T, H, 512).bfloat16()


def causal_mask(T, K):
    """[T, K] bool: the last T keys are those of the queries, each of which sees no later one."""
    return torch.ones(T, K, dtype=torch.bool).tril(K - T)


def assert_every_set_is_right(peer, work):
    contender = peer.prepare(work)
    references = References(work)
    assert len(contender.calls) == work.n_sets
    for index, call in enumerate(contender.calls):
        contender.output.poison()
        call()
        ref = references.get(index, contender.mask, contender.own_pages)
        check = judge(contender.output.out, contender.output.lse, ref, peer=True)
        assert check.green, str(check)
    return contender


def test_without_a_gpu_every_missing_peer_gives_a_reason():
    for name, peer in PEERS.items():
        reason = peer.available(CPU)
        assert (reason is None) == (name == "torch")
        assert reason is None or len(reason) > 10


def test_choose_peers():
    assert choose_peers("torch,flashmla") == ("torch", "flashmla")
    assert choose_peers("none") == ()
    assert len(choose_peers("all")) == len(PEERS)
    with pytest.raises(UsageError, match="'triton'.*flashinfer-fa2"):
        choose_peers("triton")


def test_a_peer_of_the_users_own():
    (name,) = choose_peers("tests.bench.foreign_peers:Good")
    assert find_peer(name).available(CPU) is None
    with pytest.raises(UsageError, match="foreign_peers:Nobody' cannot be imported"):
        choose_peers("tests.bench.foreign_peers:Nobody")
    with pytest.raises(UsageError, match="cannot be imported: No module named"):
        choose_peers("nowhere.at_all:Peer")


@pytest.mark.parametrize("run_length", [1, 16, 0])
def test_torch_dense(run_length):
    contender = assert_every_set_is_right(PEERS["torch"], small_work(run_length=run_length))
    assert contender.mask == "tree"


def test_torch_dense_refuses_what_would_not_fit(monkeypatch):
    monkeypatch.setattr("harness.peers.torch_dense.MAX_SCORE_BYTES", 100)
    with pytest.raises(PeerRefused, match="score matrix"):
        PEERS["torch"].prepare(small_work())


def extend_attention(
    q, k, v, o, pool_k, pool_v, qo_indptr, kv_indptr, kv_indices, mask, causal, mask_indptr, T, ks, vs, scale
):
    assert causal and (ks, vs) == (1.0, 1.0) and torch.equal(pool_v, pool_k[..., :512])
    for b in range(len(qo_indptr) - 1):
        rows = slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))
        slots = kv_indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])]
        visible = mask[int(mask_indptr[b]) :][: T * (len(slots) + T)].view(T, -1)
        o[rows] = attend(q[rows], torch.cat([pool_k[slots, 0], k[rows, 0]]), visible, scale)


def test_sglang_triton_arguments(monkeypatch):
    module = ModuleType("extend_attention")
    module.extend_attention_fwd = extend_attention
    monkeypatch.setattr(sglang_peer, "load_kernel_module", lambda name: module)
    assert assert_every_set_is_right(PEERS["sglang-triton"], small_work()).mask == "tree"


def test_sglang_chain_kernel_is_held_to_a_chain(monkeypatch):
    def kernel(q, k, v, o, *rest, max_bs):
        mask, T = torch.ones(4, 4, dtype=torch.bool).tril(), 4
        flat = torch.cat(
            [torch.cat([torch.ones(T, n, dtype=torch.bool), mask], 1).flatten() for n in (70, 0, 33)]
        )
        extend_attention(q, k, v, o, *rest[:5], flat, *rest[6:])
        return max_bs == 3

    module = ModuleType("verify")
    module.verify_shared_kv_fwd = kernel
    monkeypatch.setattr("harness.peers.sglang_chain.load_kernel_module", lambda name: module)
    assert assert_every_set_is_right(PEERS["sglang-sharedkv"], small_work()).mask == "chain"


def test_a_kernel_that_returns_false_has_refused(monkeypatch):
    module = ModuleType("verify")
    module.verify_shared_kv_fwd = lambda *args, **extra: False
    monkeypatch.setattr("harness.peers.sglang_chain.load_kernel_module", lambda name: module)
    with pytest.raises(PeerRefused, match="hands this shape back"):
        PEERS["sglang-sharedkv"].prepare(small_work()).calls[0]()


def test_the_kernel_that_faults_on_mla_is_named_and_not_called(monkeypatch):
    monkeypatch.setattr("harness.peers.sglang_chain.kernel_missing", lambda module, device: None)
    assert "faults" in PEERS["sglang-splitkv"].available(torch.device("cuda:0"))
    with pytest.raises(PeerRefused):
        PEERS["sglang-splitkv"].prepare(small_work())


class PagedWrapper:
    """The public part of FlashInfer's wrapper that the peer uses."""

    def __init__(self, workspace, backend):
        assert backend in ("fa2", "fa3") and workspace.dtype == torch.int8

    def plan(self, qo, kv, indices, lengths, H, ckv, kpe, page, causal, scale, q_type, kv_type):
        assert (H, ckv, kpe, page, causal) == (3, 512, 64, 1, True)
        assert {qo.dtype, kv.dtype, indices.dtype, lengths.dtype} == {torch.int32}
        assert torch.equal(kv.diff(), lengths)
        self._qo, self._kv, self._kv_indices_buf, self._scale = qo, kv, indices, scale

    def run(self, q_nope, q_pe, ckv, kpe, out):
        for b in range(len(self._qo) - 1):
            rows = slice(int(self._qo[b]), int(self._qo[b + 1]))
            slots = self._kv_indices_buf[int(self._kv[b]) : int(self._kv[b + 1])]
            keys = torch.cat([ckv[slots, 0], kpe[slots, 0]], -1)
            q = torch.cat([q_nope[rows], q_pe[rows]], -1)
            out[rows] = attend(q, keys, causal_mask(len(q), len(keys)), self._scale)


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_flashinfer_arguments(monkeypatch, backend):
    mla = ModuleType("flashinfer.mla")
    mla.BatchMLAPagedAttentionWrapper = PagedWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)
    monkeypatch.setattr(flashinfer_peer, "WORKSPACE_BYTES", 8)
    assert assert_every_set_is_right(PEERS[f"flashinfer-{backend}"], small_work()).mask == "chain"


@pytest.mark.parametrize("name", ["sgl_kernel.flash_mla", "flash_mla"])
@pytest.mark.parametrize("inside", [True, False], ids=["schedules inside", "schedules before"])
@pytest.mark.parametrize("run_length", [1, 0])
def test_flashmla_block_tables(monkeypatch, run_length, inside, name):
    def with_kvcache(q, cache, table, lengths, d_v, metadata, splits, softmax_scale, causal):
        assert (d_v, metadata, causal) == (512, "meta", True)
        assert table.dtype == lengths.dtype == torch.int32 and cache.shape[1:] == (64, 1, 576)
        out = []
        for b, length in enumerate(lengths.tolist()):
            keys = cache[table[b].long()].flatten(0, 2)[:length]
            out.append(attend(q[b], keys, causal_mask(q.shape[1], length), softmax_scale))
        return torch.stack(out), torch.zeros(1)

    module = ModuleType(name)
    module.flash_mla_with_kvcache = with_kvcache
    ways = (lambda: ("meta", None), lambda lengths, rows, heads: ("meta", "splits"))
    module.get_mla_metadata = ways[0] if inside else ways[1]
    monkeypatch.setitem(sys.modules, name.split(".")[0], ModuleType(name.split(".")[0]))
    monkeypatch.setitem(sys.modules, name, module)
    assert assert_every_set_is_right(PEERS["flashmla"], small_work(run_length=run_length)).own_pages


@pytest.mark.parametrize(("major", "runs"), [(9, True), (12, False)])
def test_flashmla_and_fa3_know_their_gpu(monkeypatch, major, runs):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    gpu = torch.device("cuda:0")
    reasons = (flashmla_peer._wrong_gpu(gpu), flashinfer_peer.FlashInfer("fa3")._wrong_gpu(gpu))
    for reason in reasons:
        assert (reason is None) == runs
        assert runs or "12.0" in reason
    assert flashinfer_peer.FlashInfer("fa2")._wrong_gpu(gpu) is None


@pytest.fixture
def sglang_on_path(tmp_path, monkeypatch):
    """An installed package whose own import fails, with a kernel module that asks about the hardware."""
    folder = tmp_path / "sglang" / "kernels" / "ops" / "attention"
    folder.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("raise RuntimeError('a whole server')\n")
    (tmp_path / "sglang" / "srt").mkdir()
    (tmp_path / "sglang" / "srt" / "environ.py").write_text("value = 7\n")
    (folder / "extend_attention.py").write_text(
        "from sglang.srt.environ import value\n"
        "from sglang.srt.utils import is_cuda, is_hip\n"
        "answers = (is_cuda(), is_hip(), value)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    load_kernel_module.cache_clear()
    yield tmp_path
    load_kernel_module.cache_clear()


def test_a_kernel_module_loads_without_the_server(sglang_on_path):
    module = load_kernel_module("extend_attention")
    assert module.__file__.startswith(str(sglang_on_path))
    assert module.answers == (torch.cuda.is_available(), False, 7)
    assert not [name for name in sys.modules if name.split(".")[0] == "sglang"]


def test_a_module_that_the_release_lacks_is_named(sglang_on_path):
    with pytest.raises(ImportError, match="no verify_mla.py"):
        load_kernel_module("verify_mla")


def test_a_module_that_wants_more_imports_sglang_whole(sglang_on_path):
    path = sglang_on_path / "sglang" / "kernels" / "ops" / "attention" / "verify_splitkv.py"
    path.write_text("from sglang.srt.utils import something_else\n")
    with pytest.raises(RuntimeError, match="a whole server"):
        load_kernel_module("verify_splitkv")
    assert "sglang" not in sys.modules
