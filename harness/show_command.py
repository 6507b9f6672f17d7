"""`show CASE`: what a captured step holds, and the trees and masks in it, drawn."""

from __future__ import annotations

import argparse

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from captured_tensors import CaptureCase, CaptureError, load_case
from harness.case_files import find_cases
from harness.errors import UsageError
from harness.mask_drawing import draw_forest, draw_mask
from harness.terminal import glyphs_for
from harness.trees import infer_forest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("case", metavar="CASE", help="a case file, or the name of a shipped case")


def run(args: argparse.Namespace) -> int:
    try:
        case = _load(args.case)
    except CaptureError as error:
        raise UsageError(str(error)) from error
    console = Console(highlight=False)
    console.print(Text(case.name, style="bold"))
    console.print(_sizes(case), "", _shapes(case), "", _provenance(case), sep="\n")
    for b in range(case.bs):
        console.print(_request(case, b, console))
    return 0


def _load(wanted: str) -> CaptureCase:
    """A file as it is; a bare name is looked up among the shipped cases."""
    shipped, _ = find_cases([])
    by_name = {file.path.stem: file for file in shipped}
    return by_name[wanted].load() if wanted in by_name else load_case(wanted)


def _sizes(case: CaptureCase) -> RenderableType:
    text = (
        f"bs {case.bs}, N {case.N} draft tokens, T {case.T}, H {case.H} heads, "
        f"L {', '.join(map(str, case.prefix_lengths)) or 'none'}"
    )
    return Text(text)


def _shapes(case: CaptureCase) -> Table:
    table = Table("tensor", "dtype", "shape", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name, array in case.tensors().items():
        shape = ", ".join(map(str, array.shape))
        table.add_row(name, str(array.dtype), Text(f"[{shape}]"))
    if case.out_triton is None:
        table.add_row("out_triton", "-", "not recorded")
    return table


def _provenance(case: CaptureCase) -> Table:
    table = Table("captured", "", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for key, value in sorted(case.meta.to_strings().items()):
        table.add_row(Text(key), Text(value))
    return table


def _request(case: CaptureCase, b: int, console: Console) -> RenderableType:
    mask = case.tree_mask(b)
    forest = infer_forest(mask)
    head = f"request {b}: L = {case.prefix_lengths[b]}, {len(mask)} draft tokens"
    parts: list[RenderableType] = [Text("\n" + head, style="bold")]
    if len(mask) == 0:
        return parts[0]
    if forest is None:
        parts.append(Text("not a tree: some token sees other keys than its ancestors and itself; mask only"))
    else:
        parts.append(draw_forest(forest, case.positions[case.rows_of(b)].tolist(), console.width))
    return Group(*parts, draw_mask(mask, glyphs_for(console)))
