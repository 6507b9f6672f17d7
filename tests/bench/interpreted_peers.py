"""Runs SGLang's real Triton kernels on the CPU, in Triton's interpreter, through the peers' bindings.

A program of its own, since TRITON_INTERPRET counts when Triton is imported. Prints `name: green` or what is wrong.
The interpreter has no bf16 products, hence float32 tensors.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from harness.bench_measure import References, check_contender
from harness.peers import PEERS
from harness.peers.sglang_source import NotInThisRelease
from tests.bench.conftest import small_work

NAMES = ("sglang-triton", "sglang-sharedkv")


def main() -> None:
    work = small_work(lengths=(70, 33))
    work.q, work.k, work.pool = work.q.float(), work.k.float(), work.pool.float()
    for name in NAMES:
        try:
            contender = PEERS[name].prepare(work)
        except NotInThisRelease as reason:
            print(f"{name}: {reason}")
            continue
        checks = [check_contender(contender, References(work), index) for index in range(work.n_sets)]
        wrong = [str(check) for check in checks if not check.green]
        print(f"{name}: {'; '.join(wrong) or 'green'}")


if __name__ == "__main__":
    main()
