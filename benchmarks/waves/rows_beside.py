"""How long two rows of a step's kernels take, by the way in which they are put beside each other.

    PYTHONPATH=src:benchmarks/waves python benchmarks/waves/rows_beside.py --seconds 88 --out FOLDER
    … --toy     # on a processor, small: two steps one after the other

A microbatch is captured as a profile does it (`hocket.cost.replay`). Two of them, which share
nothing: as two graphs on two streams (the way of a profile), as branches of one capture, the second
wholly before the first or call by call in turns, and as two graphs inside another; some more than
once, since a graph takes other times from capture to capture. Beside them stand real lanes with
memory of their own that begin together, the whole batch, and one lane, as `h200.py` runs them. Of
an LSTM also what is recorded of cuDNN's layer, from a model on the host and from one on the device.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from all_rows import Started, Task
from graph_kernels import Beside, times_of
from h200 import Case, one_lane
from timing import GIB, Turns, options_of, row_of
from workloads import TOYS, WORKLOADS

from hocket.capture.model import capture_program
from hocket.capture.program import Program
from hocket.cost.replay import CapturedPasses, ReplayedPasses, rows_s
from hocket.planners.waves.way import WaveWay, placed

ASKED = ("LSTM 2 x 512", "ResNet-56, CIFAR, 256", "BERT-base 16 x 128", "GPT-2 small 4 x 512",
         "Mixer, CIFAR, 64", "ResNet-56, CIFAR, 32")  # fmt: skip
OFTEN = ("LSTM", "ResNet-56, CIFAR, 256")
"""Whose lanes are made more than once."""


def forms(name: str, program: Program, device: torch.device, turns: Turns) -> None:
    """One row, and two in every way."""
    made = [CapturedPasses(ReplayedPasses(program, device), device) for _ in range(3)]
    alone = [rows_s([each], device) for each in made]
    pairs = [rows_s([made[a], made[b]], device) for a, b in ((0, 1), (1, 2), (0, 2))]
    tell(turns, name, "one row", alone[0], alone)
    tell(turns, name, "two graphs on two streams", alone[0], pairs)
    passes = [each._read for each in made]
    for label, in_turns in (("branches, one before the other", False), ("branches in turns", True)):
        graphs = [branched(made[:2], in_turns=in_turns) for _ in range(2)]
        tell(turns, name, label, alone[0], [1e-6 * min(times_of(g.replay).ahead) for g in graphs])
    kept = [torch.cuda.CUDAGraph(keep_graph=True) for _ in range(2)]
    for graph, each in zip(kept, passes, strict=False):
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            each.run()
    inside = times_of(Beside(kept).replay)
    tell(turns, name, "two graphs inside one", alone[0], [1e-6 * min(inside.ahead)])


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
    """Real lanes, the whole batch and one lane."""
    fit = case.outlook.fit
    way = placed(fit.problem, fit.aligned, apart=True)
    often = range(3 if name.startswith(OFTEN) else 1)
    ways: list[tuple[str, Callable[[], Any], WaveWay]] = [
        (f"two lanes from the start, {n}", lambda: case.ours(fit.plan_of(way), fit), way)
        for n in often
    ]
    ways += [(f"whole batch, {n}", case.whole, fit.plain) for n in often[:2]]
    ways += [(f"one lane, {n}", lambda: case.ours(one_lane(fit), fit), fit.accumulated)
             for n in often[:2]]  # fmt: skip
    for label, make, told in ways:
        row_of(turns, name, label, make, case.samples, case.device, 0,
               (told.samples_per_s, told.peak_bytes), told=case.tell)  # fmt: skip


def recurrent(name: str, case: Case, turns: Turns) -> None:
    """What is recorded of a recurrent layer, with the bytes of what it makes."""
    kept = {"optimizer": None, "repeat": False, "device": case.device.type}
    for label, model in (("on the host", case.model), ("on the device", case.fresh())):
        _, program = capture_program(model, case.batch, **kept)
        for call in program.calls:
            if "rnn" in str(call.function):
                specs = [program.tensors[t] for t in call.outputs if t is not None]
                made = " ".join(f"{spec.storage_bytes}@{spec.storage}" for spec in specs)
                turns.write(name, f"model {label}: {call.function}", made=made,
                            buffer=str(call.args[3])[:80])  # fmt: skip
        weights = [p for n, p in model.named_parameters() if "body" in n]
        turns.write(name, f"model {label}: offsets",
                    told=" ".join(str(p.storage_offset()) for p in weights))  # fmt: skip


def one_process(options: argparse.Namespace) -> None:
    """One workload, when it is its turn."""
    device = torch.device("cpu") if options.toy else torch.device("cuda")
    turns = Turns(options.turns, options.until)
    for name, (build, samples) in (TOYS if options.toy else WORKLOADS).items():
        if options.only not in name:
            continue
        case = Case(build, samples, device, int(options.cap * GIB))
        if "LSTM" in name:
            recurrent(name, case, turns)
        turns.prepared()
        with turns.turn():
            _, program = case._recorded[1]
            if options.toy:
                ReplayedPasses(program, device).run()
            else:
                forms(name, program, device, turns)
        lanes(name, case, turns)


def main() -> int:
    """A process for each workload."""
    parser = options_of(__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=88)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if not options.toy and not torch.cuda.is_available():
        sys.exit("no CUDA device here: use --toy")
    if options.turns:
        one_process(options)
        return 0
    options.extra = ""
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.time() + options.seconds - 5
    asked = [name for name in (TOYS if options.toy else ASKED) if options.only in name]
    with tempfile.TemporaryDirectory() as folder:
        started = Started([Task("rows_beside.py", name) for name in asked], folder, until, options)
        started.let_go(0.4 * options.seconds)
        started.end(until)
        rows = Path(folder) / "rows.jsonl"
        if rows.exists():
            shutil.copy(rows, options.out / "rows.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
