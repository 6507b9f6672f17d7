"""`report`: pictures and one self-contained page from the result files of `bench` and `bench-context`."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.errors import UsageError

PAGE = "index.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", metavar="RESULT.json", help="from bench or bench-context")
    parser.add_argument(
        "--out", default="report", metavar="DIR", help="folder for the files (default report)"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 0; raises UsageError for a file that is not a result, or that holds nothing to draw."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(f"report needs matplotlib, which cannot be imported: {error}") from error
    from harness.report_context_plots import context_pictures
    from harness.report_load import BENCH, CONTEXT, load_results, of_kind
    from harness.report_page import page, png
    from harness.report_plots import bench_pictures

    files = load_results(args.results)
    benches, contexts = of_kind(files, BENCH), of_kind(files, CONTEXT)
    if not benches and not contexts:
        raise UsageError(f"{', '.join(args.results)}: nothing was measured in there")
    sections = [(file, [(p, png(p)) for p in bench_pictures(file)]) for file in benches]
    together = [(p, png(p)) for p in context_pictures(contexts)]
    sections += [(file, together if position == 0 else []) for position, file in enumerate(contexts)]

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    for file, pictures in sections:
        prefix = f"{file.path.stem}-" if len(benches) > 1 and file.kind == BENCH else ""
        for picture, data in pictures:
            target = out / f"{prefix}{picture.name}.png"
            target.write_bytes(data)
            print(target)
    (out / PAGE).write_text(page(sections), encoding="utf-8")
    print(out / PAGE)
    return 0
