"""What `managed.py` measured: a table per link rate, and curves of loss over time and clocks.

python benchmarks/tables/managed_report.py results.json ... [--report report.html]
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

from hocket import __version__
from hocket.base.atomic import write_atomically
from hocket.view.drawing import svg_text
from hocket.view.page import ColumnHead, page_html, section, table

COLOURS = ("#888888", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#d62728")
WIDTH, HEIGHT, LEFT, TOP = 460, 260, 46, 14

Run = dict[str, Any]


def final(run: Run) -> float:
    return run["loss"][-1] if run["loss"][-1] is not None else float("inf")


def time_to(run: Run, loss: float) -> float | None:
    """When the loss was first at most ``loss``, between two clocks on a straight line."""
    before: tuple[float, float] | None = None
    for at_s, value in zip(run["time_s"], run["loss"], strict=True):
        if value is None:
            return None
        if value <= loss:
            if before is None or before[1] == value:
                return at_s
            part = (before[1] - loss) / (before[1] - value)
            return before[0] + part * (at_s - before[0])
        before = at_s, value
    return None


def fastest(runs: list[Run], loss: float) -> tuple[float, Run] | None:
    """The run that reaches a loss first and does not diverge later."""
    found = [(time_to(run, loss), run) for run in runs if final(run) < float("inf")]
    reached = [(at, run) for at, run in found if at is not None]
    return min(reached, key=lambda each: each[0], default=None)


def by_system(runs: list[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run["system"], []).append(run)
    return found


def rows_of(runs: list[Run]) -> list[list[str]]:
    """For each system: its best end, and when its best step size reaches SSP's best loss."""
    systems = by_system(runs)
    target_run = min(systems["SSP"], key=final)
    target, rows = final(target_run), []
    reference = time_to(target_run, target) or target_run["time_s"][-1]
    for name, own in systems.items():
        best = min(own, key=final)
        hit = fastest(own, target)
        rows.append([
            name, f"{best['rate']:g}", f"{final(best):.4f}", f"{best['time_s'][-1]:.1f}",
            "-" if hit is None else f"{hit[1]['rate']:g}",
            "never" if hit is None else f"{hit[0]:.1f}",
            "-" if hit is None else f"{hit[0] / reference - 1:+.0%}",
            f"{best['blocked_s']:.1f}", f"{best['sent_bytes'] / 1e6:.1f}",
            ", ".join(f"{run['rate']:g}" for run in own if final(run) == float("inf")) or "-",
        ])  # fmt: skip
    return rows


HEADS = ("system", "best rate", "loss", "after s", "rate", "s to SSP's best", "against SSP",
         "blocked s", "MB up", "diverged at")  # fmt: skip


def curves(runs: list[Run], over_time: bool) -> str:
    """The best run of each system as SVG."""
    best = {name: min(own, key=final) for name, own in by_system(runs).items()}
    best = {name: run for name, run in best.items() if final(run) < float("inf")}
    across = {n: r["time_s"] if over_time else range(1, len(r["loss"]) + 1)
              for n, r in best.items()}  # fmt: skip
    right = max(max(each) for each in across.values())
    low = min(final(run) for run in best.values()) * 0.95
    high = max(run["loss"][0] for run in best.values()) * 1.02
    parts = []
    for place, (name, run) in enumerate(best.items()):
        points = " ".join(
            f"{LEFT + x / right * (WIDTH - LEFT - 10):.1f},"
            f"{TOP + (high - y) / (high - low) * (HEIGHT - TOP - 30):.1f}"
            for x, y in zip(across[name], run["loss"], strict=True)
        )
        colour = COLOURS[place % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" '
                     f'stroke-width="1.6"/>')  # fmt: skip
        label = escape(f"{name}, {run['rate']:g}")
        parts.append(f'<text x="{WIDTH - 190}" y="{TOP + 14 + 15 * place}" font-size="12" '
                     f'fill="{colour}">{label}</text>')  # fmt: skip
    what = f"loss over {'seconds' if over_time else 'clocks'}, 0 to {right:.3g}"
    parts.append(svg_text(LEFT, HEIGHT - 8, what, "label"))
    parts.append(svg_text(2, TOP + 10, f"{high:.2f}", "label"))
    parts.append(svg_text(2, HEIGHT - 30, f"{low:.2f}", "label"))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" class="hocket hocket-svg" role="img" '
            f'aria-label="{what}" width="{WIDTH}" height="{HEIGHT}">'
            f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>'
            + "".join(parts) + "</svg>")  # fmt: skip


def report(results: list[Run]) -> str:
    parts = []
    for mbit in sorted({run["mbit"] for run in results}):
        runs = [run for run in results if run["mbit"] == mbit]
        drawn = f"<p>{curves(runs, True)} {curves(runs, False)}</p>"
        shown = table([ColumnHead(each) for each in HEADS], rows_of(runs))
        parts.append(section(f"mbit-{mbit:g}", f"Links of {mbit:g} Mbit/s", shown, drawn))
    return page_html(
        title="Matrix factorisation over tables",
        lead="Root mean squared error of four workers on shaped links, each system at its best "
        "step size.",
        body=parts,
        footer=f"Measured with hocket {__version__}.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    results = [run for path in options.files for run in json.loads(path.read_text())]
    for mbit in sorted({run["mbit"] for run in results}):
        print(f"\nLinks of {mbit:g} Mbit/s\n\n| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}")
        for row in rows_of([run for run in results if run["mbit"] == mbit]):
            print(f"| {' | '.join(row)} |")
    if options.report:
        write_atomically(options.report, report(results).encode())


if __name__ == "__main__":
    main()
