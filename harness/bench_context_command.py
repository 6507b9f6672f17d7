"""`bench-context`: decode speed by context length against a running SGLang server, with the GPU's own meters."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from datetime import UTC, datetime
from typing import Any

from harness.bench_context_client import APIS, Client, ServerError
from harness.bench_context_measure import Row, measure
from harness.bench_context_meters import Gauge, MetersMissing, Nvml
from harness.bench_context_prompts import TEXTS, make_prompt
from harness.bench_shapes import int_list
from harness.errors import UsageError
from harness.jsonio import STDOUT, check_target, write_json

SCHEMA = "verify-numba-context/1"
SHOWN_SERVER_FIELDS = (
    *("version", "model_path", "attention_backend", "tp_size", "page_size"),
    *(
        "speculative_algorithm",
        "speculative_num_draft_tokens",
        "speculative_eagle_topk",
        "disable_cuda_graph",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server (default %(default)s)")
    parser.add_argument("--api", choices=APIS, default="generate", help="/generate or /v1/completions")
    parser.add_argument("--api-key", metavar="KEY", help="where the server asks for one")
    parser.add_argument(
        "--contexts", default="1k,4k,16k,64k", metavar="LIST", help="prompt lengths in tokens"
    )
    parser.add_argument("--new-tokens", type=int, default=256, metavar="N", help="to decode (default 256)")
    parser.add_argument(
        "--concurrency", type=int, default=1, metavar="N", help="requests at once (default 1)"
    )
    parser.add_argument("--text", choices=TEXTS, default="predictable", help="predictable repeats a phrase")
    parser.add_argument("--vocab", type=int, default=32000, metavar="N", help="token ids are below N")
    parser.add_argument(
        "--seed", type=int, help="of the prompts (default: the clock, so that none is cached)"
    )
    parser.add_argument("--gpus", default="0", metavar="LIST", help="NVML indices to meter, or none")
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="S", help="for one answer (default 600)"
    )
    parser.add_argument("--seconds", type=float, metavar="S", help="start no further length after this time")
    parser.add_argument("--label", help="name of this run in reports, such as off or on")
    parser.add_argument("--json", metavar="FILE", help="rewritten after each length; - is stdout at the end")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, 1 where a length failed, 2 where the server does not answer or an option is unusable."""
    contexts = _checked(args)
    client = Client(args.url, args.api, args.timeout, args.api_key)
    try:
        client.check()
    except ServerError as error:
        raise UsageError(str(error)) from error
    gauge, missing = _gauge(args.gpus)
    result = _open_result(args, client, gauge, missing)
    out = sys.stderr if args.json == STDOUT else sys.stdout
    print(f"GPU meters: {missing or 'NVML'}", file=out, flush=True)
    started = time.monotonic()
    seed = args.seed if args.seed is not None else time.time_ns()
    for context in contexts:
        if args.seconds is not None and time.monotonic() - started > args.seconds:
            print(f"time is up before context {context}", file=out, flush=True)
            break
        row = _one(args, client, context, seed, gauge)
        print(row_line(row), file=out, flush=True)
        result["results"].append(row)
        if args.json and args.json != STDOUT:
            write_json(result, args.json)
    else:
        result["complete"] = True
    if args.json:
        write_json(result, args.json)
    return int(any("error" in row for row in result["results"]))


def _one(args: argparse.Namespace, client: Client, context: int, seed: int, gauge: Gauge | None) -> Row:
    prompts = [make_prompt(args.text, context, args.vocab, seed + i) for i in range(args.concurrency)]
    try:
        return measure(client, prompts, args.new_tokens, gauge)
    except ServerError as error:
        return {"context": context, "decode_tokens_per_s": None, "error": str(error)}


def row_line(row: Row) -> str:
    """One line to read."""
    head = f"context {row['context']:7d}"
    if "error" in row:
        return f"{head} | failed: {row['error']}"
    parts = [
        head,
        f"prefill {row['prefill_tokens_per_s']:8.0f} tok/s",
        f"decode {row['decode_tokens_per_s']:8.1f} tok/s",
    ]
    if row["accept_length"] is not None:
        parts.append(f"{row['accept_length']:.2f} tokens a step, {row['step_ms']:.2f} ms a step")
    if row["gpu_percent"] is not None:
        parts.append(
            f"GPU {row['gpu_percent']:.0f}%, memory {row['memory_percent']:.0f}%, {row['power_w']:.0f} W"
        )
    if row["cached_tokens"]:
        parts.append(f"{row['cached_tokens']:.0f} prompt tokens were cached")
    if row["meter_failure"]:
        parts.append(f"meters stopped: {row['meter_failure']}")
    return " | ".join(parts)


def _checked(args: argparse.Namespace) -> list[int]:
    contexts = int_list(args.contexts, "--contexts")
    for name, value, least in (
        ("--contexts", min(contexts), 1),
        ("--new-tokens", args.new_tokens, 2),
        ("--concurrency", args.concurrency, 1),
        ("--vocab", args.vocab, 2),
    ):
        if value < least:
            raise UsageError(f"{name}: {value} is below {least}")
    if not args.url.startswith(("http://", "https://")):
        raise UsageError(f"--url: {args.url!r} does not start with http:// or https://")
    if args.json:
        check_target(args.json)
    return contexts


def _gauge(text: str) -> tuple[Gauge | None, str]:
    """The meters, or None and the reason."""
    if text == "none":
        return None, "not asked for"
    try:
        return Nvml(int_list(text, "--gpus")), ""
    except MetersMissing as error:
        return None, str(error)


def _open_result(
    args: argparse.Namespace, client: Client, gauge: Gauge | None, missing: str
) -> dict[str, Any]:
    server = client.describe()
    return {
        "schema": SCHEMA,
        "label": args.label,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "harness", *_without_key(sys.argv[1:])]),
        "machine": {"gpu": gauge.name() if gauge else None},
        "server": {name: server[name] for name in SHOWN_SERVER_FIELDS if name in server},
        "text": args.text,
        "new_tokens": args.new_tokens,
        "meters_missing": missing or None,
        "results": [],
        "complete": False,
    }


def _without_key(arguments: list[str]) -> list[str]:
    """The command line without the key: results are passed around."""
    hidden, hide_next = [], False
    for argument in arguments:
        hidden.append(
            "***" if hide_next else "--api-key=***" if argument.startswith("--api-key=") else argument
        )
        hide_next = argument == "--api-key"
    return hidden
