"""Many first users at once: one compilation, whole entries, the same cubin for all."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import toy_kernels

from verify_numba.gpu.cache import CubinCache

pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

USERS = 8
CC = (9, 0)


@pytest.fixture
def build_log(tmp_path, monkeypatch) -> Path:
    """Gets one line from every real compilation of `toy_kernels.LOGGED`, in this process or another."""
    path = tmp_path / "builds.txt"
    monkeypatch.setenv(toy_kernels.BUILD_LOG, str(path))
    return path


def use_cache(folder, start, results):
    start.wait(timeout=60)
    results.put(CubinCache(Path(folder)).get(toy_kernels.LOGGED, CC).cubin)


def test_eight_processes_share_one_compilation(tmp_path, build_log):
    spawn = multiprocessing.get_context("spawn")
    start, results = spawn.Barrier(USERS), spawn.Queue()
    folder = tmp_path / "cache"
    processes = [spawn.Process(target=use_cache, args=(str(folder), start, results)) for _ in range(USERS)]
    for process in processes:
        process.start()
    cubins = {results.get(timeout=120) for _ in processes}
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0] * USERS
    assert len(cubins) == 1
    assert len(build_log.read_text().splitlines()) == 1


@pytest.mark.parametrize("shared", [True, False], ids=["one-cache", "a-cache-each"])
def test_eight_threads_share_one_compilation(tmp_path, build_log, shared):
    start = threading.Barrier(USERS)
    common = CubinCache(tmp_path / "cache")

    def use(_):
        start.wait(timeout=60)
        cache = common if shared else CubinCache(tmp_path / "cache")
        return cache.get(toy_kernels.LOGGED, CC).cubin

    with ThreadPoolExecutor(USERS) as pool:
        cubins = set(pool.map(use, range(USERS)))
    assert len(cubins) == 1
    assert len(build_log.read_text().splitlines()) == 1


def test_a_reader_beside_writers_never_sees_half_an_entry(tmp_path, build_log):
    """The entry is replaced again and again under a reader that must find every read whole."""
    from verify_numba.gpu.artifact import Artifact
    from verify_numba.gpu.cache import _write

    entry = tmp_path / "entry.cubin"
    artifacts = [Artifact("some", "_Z", "q", "", "", bytes([i]) * 300_000) for i in range(2)]
    data = [artifact.to_bytes() for artifact in artifacts]
    _write(entry, data[0])
    stop = threading.Event()

    def write():
        i = 0
        while not stop.is_set():
            _write(entry, data[i % 2])
            i += 1

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        seen = [Artifact.from_bytes(entry.read_bytes()) for _ in range(200)]
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert all(artifact in artifacts for artifact in seen)
