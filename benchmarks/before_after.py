"""The same work by an earlier state of the project and by this one, in one run on one machine.

    python benchmarks/before_after.py REVISION [--rows help,plan] [--ops 204800] [--trace FILE]

The earlier state is unpacked beside this one and run by the same interpreter with the same
packages, before and after in turn, each row once to compile and then ``--rounds`` times. Rows are
processor seconds of one process, the least of the rounds; commands are timed as typed, with all
that they load. Prints a table in Markdown. ``--trace`` is a trace of Gavel, for the fleet's row.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLANNING = """
import sys, time
time.perf_counter = time.process_time  # planners say how long they took by this clock
from hocket.plan.make import make_problem
from hocket.graph.generators import generate
from hocket.planners.compare import compare

name, num_ops = sys.argv[1], int(sys.argv[2])
compare(make_problem(generate("gnmt", 2000, 0), "16xv100-32g", transfers="queued"), [name])
problem = make_problem(generate("gnmt", num_ops, 0), "16xv100-32g", transfers="queued")
candidates = compare(problem, [name]).candidates
seconds = [candidate.plan_seconds for candidate in candidates]
print(seconds[-1] if candidates[-1].planner == "auto" else sum(seconds))
"""
SIMULATING = """
import sys, time
from hocket.plan.make import make_problem
from hocket.graph.generators import generate
from hocket.planners.compare import compare
from hocket.simulate import simulate

name, num_ops, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
problem = make_problem(generate("gnmt", num_ops, 0), "16xv100-32g", transfers=mode)
plan = compare(problem, [name]).candidates[0].plan
times = []
for _ in range(3):
    begin = time.process_time()
    simulate(problem, plan)
    times.append(time.process_time() - begin)
print(min(times))
"""
Row = Callable[[Path], float]
"""The seconds of one round with the sources in a folder."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision")
    parser.add_argument("--rows", default="")
    parser.add_argument("--ops", type=int, default=204_800)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        before = unpacked(options.revision, work / "before")
        rows = all_rows(work, options.ops, options.trace)
        wanted = options.rows.split(",") if options.rows else list(rows)
        if unknown := sorted(set(wanted) - set(rows)):
            parser.error(f"no row is called {unknown[0]!r}; there are {', '.join(rows)}")
        print("| what | before, s | after, s | ratio |\n|---|---|---|---|", flush=True)
        for name in wanted:
            print(measured(name, rows[name], before, options.rounds), flush=True)


def unpacked(revision: str, folder: Path) -> Path:
    """The sources of a revision."""
    folder.mkdir()
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", revision, "src"], stdout=subprocess.PIPE, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder / "src"


def measured(name: str, row: Row, before: Path, rounds: int) -> str:
    """A line of the table; what fails is told and does not end the others."""
    times: dict[Path, list[float]] = {before: [], ROOT / "src": []}
    try:
        for number in range(rounds + 1):
            for source, seen in times.items():
                seconds = row(source)
                if number:  # the first one compiles
                    seen.append(seconds)
    except (subprocess.CalledProcessError, ValueError, KeyError) as error:
        return f"| {name} | failed: {str(error)[:80]} | | |"
    old_s, new_s = (min(seen) for seen in times.values())
    return f"| {name} | {old_s:.3f} | {new_s:.3f} | {new_s / old_s:.2f} |"


def all_rows(work: Path, num_ops: int, trace: Path | None) -> dict[str, Row]:
    """What is timed, by name."""
    graph, market = work / "graph.json.gz", work / "market.json"
    write_inputs(graph, market)
    plan = ("plan", str(graph), "--on", "4xv100-16g", "--json")
    parallel = ("parallel", "gpt3-175b", "--on", "512xdgx-a100-80g", "--batch", "1536", "--json",
                "--software", "megatron-core")  # fmt: skip
    rows: dict[str, Row] = {
        "help": lambda source: command_s(source, "--help"),
        "plan": lambda source: command_s(source, *plan),
        "plan by m-sct": lambda source: command_s(source, *plan, "--planner", "m-sct"),
        "parallel": lambda source: command_s(source, *parallel),
        "allocate": lambda source: solved_s(source, market),
    }
    for name in ("m-etf", "m-sct", "pardnn", "auto"):
        rows[f"place by {name}"] = lambda source, name=name: script_s(
            source, PLANNING, name, str(num_ops)
        )
    for name in ("layer-blocks", "m-topo"):
        for mode in ("shared", "queued"):
            rows[f"simulate {name} {mode}"] = lambda source, name=name, mode=mode: script_s(
                source, SIMULATING, name, str(num_ops), mode
            )
    if trace is not None:
        fleet = ("fleet", "simulate", str(trace), "--cluster", "v100:36,p100:36,k80:36",
                 "--jobs", "4000:5000", "--json")  # fmt: skip
        rows["fleet as Gavel does it"] = lambda source: command_s(
            source, *fleet, "--compatible", "gavel"
        )
        rows["fleet"] = lambda source: command_s(source, *fleet)
    return rows


def write_inputs(graph: Path, market: Path) -> None:
    """A graph of 2,000 ops, and a market of 2,048 jobs on three kinds."""
    hocket(ROOT / "src", "generate", "transformer", "--ops", "2000", "-o", str(graph))
    draws = random.Random(0)
    kinds = {"v100": 400, "p100": 400, "k80": 400}
    jobs = [
        {"id": str(number), "throughputs": {kind: draws.uniform(0.5, 4) for kind in kinds}}
        for number in range(2048)
    ]
    market.write_text(json.dumps({"devices": kinds, "jobs": jobs}))


def hocket(source: Path, *arguments: str) -> str:
    """What a command prints."""
    return run(source, "-m", "hocket", *arguments)


def run(source: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, check=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return done.stdout


def command_s(source: Path, *arguments: str) -> float:
    """Processor seconds of a command with its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    hocket(source, *arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def solved_s(source: Path, market: Path) -> float:
    """What ``hocket fleet allocate`` says that solving took."""
    return float(
        json.loads(hocket(source, "fleet", "allocate", str(market), "--json"))["solve_seconds"]
    )


def script_s(source: Path, script: str, *arguments: str) -> float:
    """The number that a script prints."""
    return float(run(source, "-c", script, *arguments))


if __name__ == "__main__":
    main()
