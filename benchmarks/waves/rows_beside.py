"""How long two rows of a step's kernels take, by the way in which they are put beside each other.

    PYTHONPATH=src:benchmarks/waves python benchmarks/waves/rows_beside.py --seconds 88 --out FOLDER
    … --toy     # on a processor, small: two steps one after the other

A microbatch is captured as a profile does it (`hocket.cost.replay`). Two of them, which share
nothing: as two graphs on two streams (the way of a profile), and as branches of one capture, the
second wholly before the first or call by call in turns; each more than once, since a graph may take
other times from capture to capture. Beside them stand real lanes with memory of their own that
begin together, as `h200.py` runs them and as their graph alone, and of an LSTM the whole batch and
one lane, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from all_rows import Task, run
from graph_kernels import times_of
from h200 import Case, one_lane
from step_kernels import Captured, looped
from timing import GIB, Turns, options_of, parsed, row_of
from workloads import TOYS, WORKLOADS

from hocket.capture.program import Program
from hocket.cost.replay import CapturedPasses, ReplayedPasses, rows_s
from hocket.planners.waves.way import placed

ASKED = ("LSTM 2 x 512", "ResNet-56, CIFAR, 256", "BERT-base 16 x 128", "GPT-2 small 4 x 512",
         "Mixer, CIFAR, 64", "ResNet-56, CIFAR, 32")  # fmt: skip
OFTEN = {"LSTM 2 x 512": 3, "ResNet-56, CIFAR, 256": 2}
"""How often lanes are made, where it is more than once."""


def forms(name: str, program: Program, device: torch.device, turns: Turns) -> None:
    """One row, and two in every way."""
    made = [CapturedPasses(ReplayedPasses(program, device), device) for _ in range(3)]
    alone = [rows_s([each], device) for each in made]
    pairs = [rows_s([made[a], made[b]], device) for a, b in ((0, 1), (1, 2), (0, 2))]
    tell(turns, name, "one row", alone[0], alone)
    tell(turns, name, "two graphs on two streams", alone[0], pairs)
    for label, in_turns in (("branches, one before the other", False), ("branches in turns", True)):
        graphs = [branched(made[:2], in_turns=in_turns) for _ in range(2)]
        tell(turns, name, label, alone[0], [1e-6 * min(times_of(g.replay).ahead) for g in graphs])


def branched(made: list[CapturedPasses], *, in_turns: bool) -> torch.cuda.CUDAGraph:
    """Two rows as branches of one capture."""
    graph, (first, second) = torch.cuda.CUDAGraph(), (each.stream for each in made)
    with torch.cuda.graph(graph, stream=first, capture_error_mode="relaxed"):
        second.wait_stream(first)
        rows = [calls_on(each._read, each.stream) for each in made]
        if in_turns:
            for calls in zip_longest(*rows):
                del calls
        else:
            for row in reversed(rows):
                for _ in row:
                    pass
        first.wait_stream(second)
    return graph


def calls_on(passes: ReplayedPasses, stream: torch.cuda.Stream) -> Any:
    """Ask for the calls of a row, one with each step of what is returned."""
    known = dict(passes._given)
    for call, dropped in zip(passes._calls, passes._dropped, strict=True):
        with torch.cuda.stream(stream), torch.enable_grad():
            call.perform(known, 1)
        for tensor in dropped:
            known.pop(tensor, None)
        yield


def tell(turns: Turns, name: str, label: str, one_s: float, seconds: list[float]) -> None:
    """A row: times of one, of each capture."""
    turns.write(name, label, ms=" ".join(f"{1e3 * each:.3f}" for each in seconds),
                of_one=" ".join(f"{each / one_s:.3f}" for each in seconds))  # fmt: skip


def lanes(name: str, case: Case, turns: Turns) -> None:
    """Real lanes and their graph alone; of an LSTM the whole batch and one lane, too."""
    fit = case.outlook.fit
    way = placed(fit.problem, fit.aligned, apart=True)
    for number in range(OFTEN.get(name, 1)):
        kept: list[Captured] = []

        def make(kept: list[Captured] = kept) -> Callable[[], Any]:
            kept.append(looped(case, fit.plan_of(way)))
            return kept[0].step

        told = way.samples_per_s, way.peak_bytes
        label = f"two lanes from the start, {number}"
        row_of(turns, name, label, make, case.samples, case.device, 0, told)
        if kept and hasattr(kept[0].waves, "repeats"):
            graph = kept[0].waves.repeats.captured.graph  # type: ignore[attr-defined]
            with turns.turn():
                times = times_of(graph.replay)
            turns.write(name, f"{label}, graph alone", ahead_ms=1e-3 * min(times.ahead),
                        ms=1e-3 * min(times.back_to_back), host_ms=1e-3 * times.host)  # fmt: skip
    if "LSTM" in name:
        for label, make, told_way in (
            ("whole batch", case.whole, fit.plain),
            ("one lane", lambda: case.ours(one_lane(fit), fit), fit.accumulated),
        ):
            row_of(turns, name, label, make, case.samples, case.device, 0,
                   (told_way.samples_per_s, told_way.peak_bytes), told=case.tell)  # fmt: skip


def one_process(options: argparse.Namespace) -> None:
    """One workload, when it is its turn."""
    device = torch.device("cpu") if options.toy else torch.device("cuda")
    turns = Turns(options.turns, options.until)
    for name, (build, samples) in (TOYS if options.toy else WORKLOADS).items():
        if options.only not in name:
            continue
        case = Case(build, samples, device, int(options.cap * GIB))
        turns.prepared()
        lanes(name, case, turns)
        _, program = case._recorded[1]
        if options.toy:
            ReplayedPasses(program, device).run()
        elif any(part in name for part in options.forms.split(";")):
            with turns.turn():
                forms(name, program, device, turns)


def main() -> int:
    """A process for each workload."""
    parser = options_of(__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=88)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--forms", default="", help="workloads whose rows are timed, by ;")
    options = parsed(parser)
    if options.turns:
        one_process(options)
        return 0
    options.extra = ""
    asked = [name for name in (TOYS if options.toy else ASKED) if options.only in name]
    tasks = [Task("rows_beside.py", name, (f"--forms={options.forms}",)) for name in asked]
    run(tasks, options, 0.4 * options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
