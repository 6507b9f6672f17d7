"""The replay report to read: a few lines a case, a line for each failure, and the sum."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from harness.case_files import Unusable
from harness.comparison import Comparison, Subject
from harness.replay import CaseReport, Verdict

GOOD, BAD = "green", "bold red"
INDENT = (0, 0, 0, 2)

COLUMNS = (
    # heading, columns, justify; with the gaps 80 in all, so that a terminal of 80 shows every line whole
    ("", 14, "left"),
    ("max abs", 7, "right"),
    ("max ulp", 7, "right"),
    ("row ulp", 7, "right"),
    ("relnorm", 7, "right"),
    ("LSE abs", 7, "right"),
    ("used", 5, "right"),
    ("worst at", 14, "right"),
    ("", 4, "left"),
)

LEGEND = """\
max ulp   largest error in bf16 ulp at the element's own magnitude (much where a
          sum cancels); row ulp: at the magnitude of its row's largest element
used      largest share of the allowed error, over elements, rows and the whole
worst at  request,token,head,column that uses most of what it is allowed"""


def heading() -> RenderableType:
    """The column headings, printed once."""
    table = _table()
    table.add_row(*(Text(name, style="bold") for name, _, _ in COLUMNS))
    return table


def case_block(report: CaseReport, *, brief: bool = False) -> RenderableType:
    """One case; `brief` leaves out the comparisons that passed."""
    lines: list[RenderableType] = [_title(report)]
    if not brief or report.failures:
        lines.append(_comparisons(report))
    blame = [f for f in report.failures if f.check.reference is not Subject.CAPTURED]
    lines += [Padding(Text(fault, style=BAD), INDENT) for fault in report.faults]
    lines += [Padding(Text(failure.describe(), style=BAD), INDENT) for failure in blame]
    lines += [Padding(Text(note, style="dim"), INDENT) for note in report.notes]
    return Group(*lines)


def unusable_line(unusable: Unusable) -> RenderableType:
    """One input that could not be replayed."""
    path = Path(unusable.path)
    here = Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return Text.assemble(("unusable ", BAD), f"{shown}: {unusable.error}")


def summary(reports: Sequence[CaseReport], unusable: Sequence[Unusable], device: str) -> RenderableType:
    """How many cases passed, which side was off in how many, and where it ran."""
    passed = sum(r.verdict is Verdict.PASS for r in reports)
    kernels = sum(r.verdict.kernels_off for r in reports)
    captured = sum(r.verdict.captured_off for r in reports)
    seconds = sum(r.total_seconds for r in reports)
    text = Text(f"{_plural(len(reports), 'case')} on {device} in {seconds:.1f} s: ")
    text.append(f"{passed} pass", style=GOOD if passed == len(reports) else "")
    for number, what in (
        (kernels, "kernels off"),
        (captured, "captured output off"),
        (len(unusable), "unusable"),
    ):
        if number:
            text.append(f", {number} {what}", style=BAD)
    return text


def _title(report: CaseReport) -> Text:
    verdict = report.verdict
    title = Text.assemble(
        (report.name, "bold"), "  ", (verdict.value, GOOD if verdict is Verdict.PASS else BAD), "\n"
    )
    lengths = ", ".join(map(str, report.prefix_lengths))
    title.append(f"  bs {report.bs}, T {report.T}, H {report.H}, L {lengths}", style="dim")
    if "whole" in report.seconds:
        title.append(f"; kernels {_time(report.seconds['whole'])}", style="dim")
    return title


def _comparisons(report: CaseReport) -> Table:
    table = _table()
    pairs: dict[tuple[Subject, Subject, str], dict[str, Comparison]] = {}
    for c in report.comparisons:
        pairs.setdefault((c.check.subject, c.check.reference, c.check.part), {})[c.check.tensor] = c
    for (subject, reference, part), by_tensor in pairs.items():
        table.add_row(*_cells(_label(subject, reference, part), by_tensor["out"], by_tensor.get("lse")))
    return table


def _label(subject: Subject, reference: Subject, part: str) -> str:
    if reference is Subject.CAPTURED:
        return "kern-captured"
    if subject is Subject.PERMUTED:
        return "slots permuted"
    return f"{subject.value} {part}"


def _cells(label: str, out: Comparison, lse: Comparison | None) -> list[Text]:
    both = [out] if lse is None else [out, lse]
    passed = all(c.passed for c in both)
    worst = max(both, key=lambda c: (not c.passed, c.budget_use)).worst
    return [
        Text(label),
        _number(out.max_abs, out.passed),
        _number(out.max_ulp, out.passed),
        _number(out.max_row_ulp, out.passed),
        _number(out.rel_norm, out.passed),
        Text("-") if lse is None else _number(lse.max_abs, lse.passed),
        Text(_share(max(c.budget_use for c in both))),
        Text("-" if worst is None else str(worst)),
        Text("pass", style=GOOD) if passed else Text("FAIL", style=BAD),
    ]


def _number(value: float | None, passed: bool) -> Text:
    if value is None:
        return Text("-")
    text = "0" if value == 0 else f"{value:.2f}" if 0.1 <= value < 1000 else f"{value:.1e}"
    return Text(text, style="" if passed else BAD)


def _share(use: float) -> str:
    return f"{use:.0%}" if use < 10 else ">999%"


def _table() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    for _, width, justify in COLUMNS:
        table.add_column(width=width, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _plural(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")
