"""How good plans are: every planner on the suite, ``auto`` against the best of the others.

    .venv/bin/python benchmarks/placement/quality.py                  # all, some twenty minutes
    .venv/bin/python benchmarks/placement/quality.py gpt2 small       # names that contain a word
    .venv/bin/python benchmarks/placement/quality.py --out FOLDER     # also write the table there

Steps are what the simulator says. For the small graphs the optimum is proven by ``optimal`` (needs
OR-tools). Results: ``docs/concepts/placement.md``.
"""

from __future__ import annotations

import datetime
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import suite

from hocket.base.errors import HocketError
from hocket.plan.problem import Problem
from hocket.planners.auto import AUTO, portfolio
from hocket.planners.bounds import lower_bound
from hocket.planners.candidates import propose
from hocket.planners.registry import BASE

SHOWN = ("one-device", "layer-blocks", "device-map-auto", "m-topo", "m-etf", "m-sct", "pardnn")
RIVALS = ("m-topo", "m-etf", "m-sct", "pardnn")


def row_of(name: str, problem: Problem) -> dict[str, float | str]:
    """Steps of all planners on one problem, in seconds; nan where nothing fits."""
    started = time.process_time()
    steps = {c.planner: c.step_s or math.nan for c in portfolio(problem)}
    row: dict[str, float | str] = {"name": name, "ops": problem.graph.num_ops, **steps}
    row["seconds"] = time.process_time() - started
    row["bound"] = lower_bound(problem).seconds
    if name.startswith("small"):
        proven = propose(problem, "optimal", BASE["optimal"])
        bound_s = None if proven.plan is None else proven.plan.claims.step_bound_s
        row["optimum"] = math.nan if bound_s is None else bound_s
    return row


def geometric_mean(values: Iterable[float]) -> float:
    """Over the values that are numbers."""
    logs = [math.log(value) for value in values if value == value and value > 0]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def lines_of(rows: list[dict[str, float | str]]) -> list[str]:
    """The table and what it says, as Markdown."""
    heads = ["problem", "ops", *SHOWN, AUTO, "bound", "gap", "CPU s"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        best, bound = float(row[AUTO]), float(row["bound"])
        cells = [str(row["name"]), f"{row['ops']:,}"]
        cells += [f"{1e3 * float(row[planner]):,.4g}" for planner in (*SHOWN, AUTO)]
        cells += [f"{1e3 * bound:,.4g}", f"{1 - bound / best:.0%}", f"{float(row['seconds']):.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Steps in milliseconds; nan: does not fit.", ""]
    for rival in (*SHOWN,):
        ratio = geometric_mean(float(row[rival]) / float(row[AUTO]) for row in rows)
        lines.append(f"- {rival} takes {ratio:.3f} times as long as auto (geometric mean)")
    worse = [
        row["name"]
        for row in rows
        if any(float(row[rival]) < float(row[AUTO]) * (1 - 1e-9) for rival in RIVALS)
    ]
    lines.append(f"- auto is worse than one of {', '.join(RIVALS)} on {len(worse)}: {worse}")
    lines.append(
        f"- bound / auto: {geometric_mean(float(r['bound']) / float(r[AUTO]) for r in rows):.3f}"
    )
    gaps = [float(r[AUTO]) / float(r["optimum"]) - 1 for r in rows if "optimum" in r]
    if gaps:
        lines.append(
            f"- {len(gaps)} graphs of at most 30 ops: {sum(gaps) / len(gaps):.2%} above the "
            f"optimum on average, {max(gaps):.2%} at most"
        )
    return lines


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    out = Path(words.pop()) if "--out" in sys.argv else None
    rows = []
    for name, problem in suite.problems():
        if words and not any(word in name for word in words):
            continue
        try:
            rows.append(row_of(name, problem))
        except HocketError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        print(f"{name}: auto {1e3 * float(rows[-1][AUTO]):.4g} ms", file=sys.stderr, flush=True)
    text = "\n".join(lines_of(rows))
    print(text)
    if out is not None:
        day = datetime.date.today().isoformat()
        (out / f"{day}-placement-quality.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
