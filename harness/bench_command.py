"""`bench`: time the verify kernels against the floors of the machine and against other people's kernels."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from harness import bench_options
from harness.bench_shapes import PRESET_PEERS
from harness.errors import UsageError
from harness.jsonio import check_target, write_json

add_arguments = bench_options.add_arguments


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 all measured, 1 ours was wrong somewhere, 2 unusable input or nothing to run on."""
    settings = bench_options.read_settings(args)
    if args.json:
        check_target(args.json)
    try:
        import torch
    except ImportError as error:
        raise UsageError(f"bench needs torch, which cannot be imported: {error}") from error
    device = _device(args.device, torch.cuda.is_available(), torch.cuda.device_count())
    from harness.bench_contestant import Limits
    from harness.bench_run import BenchRun
    from harness.peers import choose_peers, find_peer

    peers = choose_peers(args.peers or PRESET_PEERS.get(args.preset, "all"))
    if args.list_peers:
        for name in peers:
            print(f"{name}: {find_peer(name).available(torch.device(device)) or 'ready'}")
        return 0
    pool = bench_options.int_list(args.pool_slots, "--pool-slots")[0] if args.pool_slots else None
    log_dir = Path(args.log_dir) if args.log_dir else None
    if log_dir:
        log_dir.mkdir(parents=True, exist_ok=True)
    bench = BenchRun(
        settings=settings,
        peers=peers,
        device=torch.device(device),
        seed=args.seed,
        pass_seconds=args.pass_seconds,
        seconds=args.seconds,
        pool_slots=pool,
        commit=args.commit,
        limits=Limits(start=args.start_limit, step=args.step_limit),
        log_dir=log_dir,
        store=(lambda result: write_json(result, args.json)) if args.json not in (None, "-") else _ignore,
    )
    with _lines_to_stderr(args.json == "-"):
        code = bench.run()
    if args.json == "-":
        write_json(bench.result, "-")
    return code


def _lines_to_stderr(wanted: bool) -> contextlib.AbstractContextManager[object]:
    return contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext()


def _ignore(result: object) -> None:
    return None


def _device(text: str, has_gpu: bool, count: int) -> str:
    """Torch device name. Raises UsageError without a GPU, unless the CPU was asked for."""
    if text == "cpu":
        return "cpu"
    if text not in ("auto", "gpu") and not (text.startswith("cuda:") and text[5:].isdigit()):
        raise UsageError(f"--device: {text!r} is none of auto, gpu, cuda:N, cpu")
    if not has_gpu:
        raise UsageError(
            "bench found no NVIDIA GPU that torch can use; --device cpu times the CPU run instead"
        )
    index = int(text[5:]) if text.startswith("cuda:") else 0
    if index >= count:
        raise UsageError(f"--device: {text} is not there, torch sees {count} GPUs")
    return f"cuda:{index}"
