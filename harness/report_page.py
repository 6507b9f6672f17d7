"""One HTML page that needs no other file: pictures inside, tables with commands, machines and versions."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

from harness.report_load import BENCH, Record, ResultFile
from harness.report_style import DPI, Picture, short

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
figure { margin: 1.5rem 0; } figure img { width: 100%; height: auto; background: #fff; border-radius: 6px; }
figcaption { font-size: .88rem; opacity: .8; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
code, pre { font-size: .85rem; } pre { overflow-x: auto; padding: .6rem; background: #8881; border-radius: 6px; }
"""


def png(picture: Picture) -> bytes:
    """The picture as a PNG file."""
    buffer = io.BytesIO()
    picture.figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def page(sections: Sequence[tuple[ResultFile, Sequence[tuple[Picture, bytes]]]]) -> str:
    """The whole page; a section is a result with its pictures as PNG."""
    body = "".join(_section(file, pictures) for file, pictures in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>verify-numba: measurements</title><style>{STYLE}</style></head>\n"
        f"<body><h1>verify-numba: measurements</h1>\n{body}</body></html>\n"
    )


def _section(file: ResultFile, pictures: Sequence[tuple[Picture, bytes]]) -> str:
    table = _bench_table(file.records) if file.kind == BENCH else _context_table(file.records)
    figures = "".join(
        f'<figure><img alt="{_text(picture.caption)}" src="data:image/png;base64,'
        f'{base64.b64encode(data).decode()}"><figcaption>{_text(picture.caption)}</figcaption></figure>\n'
        for picture, data in pictures
    )
    return f"<h2>{_text(file.label)}: {_text(file.machine)}</h2>\n{_origin(file)}{figures}{table}"


def _origin(file: ResultFile) -> str:
    result = file.result
    versions = ", ".join(f"{k} {v}" for k, v in (result.get("versions") or {}).items() if v)
    lines = [
        f"$ {result.get('command', 'command unknown')}",
        f"started {result.get('started', 'unknown')}, commit {result.get('commit') or 'unknown'}",
        versions,
    ]
    missing = [f"{n}: {p['missing']}" for n, p in (result.get("peers") or {}).items() if p.get("missing")]
    lines += [f"peer not measured: {line}" for line in missing]
    if not result.get("complete", True):
        lines.append("the run ended before all shapes were measured")
    return f"<pre>{_text(chr(10).join(filter(None, lines)))}</pre>\n"


def _bench_table(records: Sequence[Record]) -> str:
    peers = sorted({name for r in records for name in r["peers"]})
    head = ["shape", "slots", "mode", "splits", "us", "spread %", "GB/s", "TFLOP/s", "% of floor", *peers]
    return _table(head, [_bench_row(r, peers) for r in records])


def _bench_row(r: Record, peers: Sequence[str]) -> list[str]:
    lengths = r["lengths"]
    uniform = len(set(lengths)) == 1
    length = f"{r['bs']} x {short(lengths[0])}" if uniform else f"{r['bs']} mixed, {sum(lengths)} in all"
    return [
        f"H {r['H']}, T {r['T']}, {length}",
        r["slots"],
        r["mode"],
        "plan" if r["nsplit"] is None else str(r["nsplit"]),
        f"{r['us']:.1f}",
        f"{r['spread_percent']:.1f}",
        f"{r['gbps']:.0f}",
        f"{r['tflops']:.1f}",
        f"{r['percent_of_floor']:.1f}",
        *(_peer_cell(r["peers"].get(name)) for name in peers),
    ]


def _peer_cell(peer: dict[str, Any] | None) -> str:
    if not peer:
        return ""
    if peer.get("us") is None:
        return str(peer.get("error") or "wrong")
    by_events = " (eager)" if "eager" in str(peer.get("note")) else ""
    return f"{peer['us']:.1f} us, {peer['ratio']:.2f}x{by_events}"


def _context_table(records: Sequence[Record]) -> str:
    columns = [
        ("context", "context", "{:d}"),
        ("prefill_tokens_per_s", "prefill tok/s", "{:.0f}"),
        ("decode_tokens_per_s", "decode tok/s", "{:.1f}"),
        ("accept_length", "accepted a step", "{:.2f}"),
        ("gpu_percent", "GPU %", "{:.0f}"),
        ("memory_percent", "memory controller %", "{:.0f}"),
        ("power_w", "power W", "{:.0f}"),
    ]
    rows = [["" if r.get(k) is None else form.format(r[k]) for k, _, form in columns] for r in records]
    return _table([title for _, title, _ in columns], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>\n'


def _text(value: str) -> str:
    return html.escape(value)
