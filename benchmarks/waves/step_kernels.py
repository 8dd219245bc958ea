"""Every kernel of a replayed step: when it ran, how long, and how much of the device it can take.

    PYTHONPATH=src:benchmarks/waves python benchmarks/waves/step_kernels.py --seconds 115 --out FOLDER
    … --toy     # on a processor, small: no kernels, all else

For each workload the whole batch, one microbatch, two in one lane, two lanes as planned and in one
memory, captured as the runtime does, and two microbatches that share nothing as two rows of one
graph. Of each the time of a step, without the profiler: back to back, and with a device that sleeps
until the host has asked for all; what the host needs to launch; then all kernels of two replays.
`tied_rows.py` has rows of equal kernels with waits between them. A form that takes longer than
`_LIMIT_S` ends its process, and the others get their turns. (Lanes in one memory without the waits
for it are not among the forms: kernels that count in memory which another overwrites never end.)

A line per form (``rows.jsonl``) and a file per workload (``NAME.json.gz``): ``kernels`` is a table;
a form has ``calls`` (wave, op), ``nodes`` (how many each call has), ``waits`` (calls) and
``replays``: rows of kernel (a number of ``kernels``: name, then `graph_kernels._STATIC`), start ns,
length ns, stream.
"""  # noqa: E501

from __future__ import annotations

import argparse
import faulthandler
import gzip
import json
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from all_rows import Task, run
from graph_kernels import Beside, Table, profiled, spans_of, times_of
from h200 import Case, one_lane, quickest, shared
from timing import GIB, Turns, options_of, parsed
from workloads import TOYS, WORKLOADS

from hocket.plan.files import SavedPlan
from hocket.plan.plan import Plan
from hocket.runtime.smaller import with_graph
from hocket.runtime.synthetic import SyntheticTraining
from hocket.runtime.train import replayed_waves
from hocket.runtime.train.graph_nodes import arrows_of, calls_of
from hocket.runtime.train.replayed_waves import Notes
from hocket.runtime.train.traced_model import Programs
from hocket.runtime.train.waves import WaveOrder, Waves, counted_ops

ASKED = ("ResNet-56, CIFAR, 256", "Mixer, CIFAR, 64", "BERT-base 16 x 128", "GPT-2 small 4 x 512",
         "ResNet-56, CIFAR, 32", "LSTM 2 x 512")  # fmt: skip
_LIMIT_S = 12
"""Of one form; most take two."""
_WARM = 4
"""Steps until all is captured."""
_NUM_PROFILED, _NUM_KEPT = 3, 2
_AGAIN, _LANES, _SHARED = "one wave, again", "two lanes", "two lanes, shared memory"
_APART = "two rows, nothing shared"


# ── what is captured ─────────────────────────────────────────────────────────────────────────────


class OpenNotes(Notes):
    """Notes that keep the graph, how many nodes each call has, and which calls wait for which."""

    graph: torch.cuda.CUDAGraph
    num_nodes: list[int]
    waits: list[tuple[int, int]]

    def _take_apart(self, graph: torch.cuda.CUDAGraph, trace: list[Any]) -> None:
        tied = calls_of(arrows_of(graph.raw_cuda_graph()), self._ends)
        super()._take_apart(graph, trace)
        call_of = {node: call for own in (tied.first, tied.last) for call, nodes in enumerate(own)
                   for node in nodes}  # fmt: skip
        ends = {(call_of.get(a.src), call_of.get(a.dst))
                for a in arrows_of(graph.raw_cuda_graph())}  # fmt: skip
        self.graph, self.num_nodes = graph, tied.num_nodes
        self.waits = sorted(
            (a, b)
            for a, b in ends
            if a is not None and b is not None and self.lane[a] != self.lane[b]
        )


class Captured(NamedTuple):
    """Waves that were captured, or that run call by call on a processor."""

    waves: Waves
    order: WaveOrder
    step: Callable[[], Any]
    """A step as a loop makes it, where there is one."""

    @property
    def notes(self) -> OpenNotes:
        """Of the graph."""
        return self.waves.notes  # type: ignore[attr-defined, no-any-return]

    def warm(self) -> Captured:
        """Steps until there is a graph."""
        for _ in range(_WARM):
            self.step()
        refusal = getattr(self.waves, "repeats", None) and self.waves.repeats.refusal  # type: ignore[attr-defined]
        if refusal:
            raise RuntimeError(f"was not captured: {refusal}")
        return self


def looped(case: Case, plan: Plan) -> Captured:
    """A loop whose waves are in one lane or two."""
    train = SyntheticTraining(
        SavedPlan(case.outlook.fit.problem, plan),
        case.fresh(),
        lambda step: case.batch,
        case.device,
    ).loop
    waves = train._strategy._waves
    return Captured(waves, waves._order, lambda: train.step(case.batch))


def chain(case: Case, size: int) -> Captured:
    """One wave of so many samples, and no update."""
    model = case.fresh()
    batch = {name: rows[:size] for name, rows in case.batch.items()}
    graph, program = case.recipe.trace(model, batch, "train")
    problem = with_graph(case.outlook.fit.problem, graph)
    plan = Plan(planner="one wave").placing(np.zeros(graph.num_ops, dtype=np.int32))
    programs = Programs(
        model, batch, case.recipe, problem, plan, program, [case.device], seed=None, outputs=False,
        max_shapes=4, replay=True, is_ranked=False,
    )  # fmt: skip
    ops = tuple(op for op, _ in counted_ops(graph))
    order = WaveOrder(tuple((0, op) for op in ops), {}, ops)
    waves = replayed_waves.make_waves(programs, order, case.device)

    def step() -> None:
        waves.train([batch], 1, [1.0])
        model.zero_grad(set_to_none=True)

    return Captured(waves, order, step)


# ── one workload ─────────────────────────────────────────────────────────────────────────────────


class Found:
    """What is known of a workload, written after every form."""

    def __init__(self, name: str, case: Case, turns: Turns, out: Path) -> None:
        self._name, self._case, self._turns = name, case, turns
        self._path = out / f"{''.join(c if c.isalnum() else '-' for c in name)}.json.gz"
        self.kernels = Table()
        self.data: dict[str, Any] = {"workload": name, "samples": case.samples, "forms": {}}

    def add(self, form: str, launch: Callable[[], Any], rows: int, **known: Any) -> None:
        """Time and profile a form; ``rows`` of kernels are in it side by side."""
        if self._case.device.type != "cuda":
            launch()
            self._keep(form, {**known, "replays": []})
            return
        times = times_of(launch)
        found: dict[str, Any] = {**known, "times_us": times._asdict()}
        replays = profiled(launch, _NUM_PROFILED, self.kernels)
        found["replays"] = replays[-_NUM_KEPT:]
        self._keep(form, found)
        spans = spans_of(replays[-1])
        self._turns.write(
            self._name, form, step_us=statistics.median(times.back_to_back),
            ahead_us=statistics.median(times.ahead), host_us=times.host,
            spread=max(times.back_to_back) / min(times.back_to_back), kernels=spans.kernels,
            profiled_us=spans.span_us, sum_us=spans.sum_us, idle_us=spans.idle_us,
            both_us=spans.both_us, gap_us=spans.gap_us(rows), waits=len(known.get("waits", ())),
        )  # fmt: skip

    def fail(self, form: str) -> None:
        """One form that cannot run must not hide the others."""
        error = sys.exc_info()[1]
        traceback.print_exc()
        self._turns.write(self._name, form, failed=f"{type(error).__name__}: {str(error)[:300]}")

    def _keep(self, form: str, found: dict[str, Any]) -> None:
        self.data["forms"][form] = found
        self.save()

    def save(self) -> None:
        """As a file."""
        text = json.dumps({**self.data, "kernels": self.kernels.values}, separators=(",", ":"))
        self._path.write_bytes(gzip.compress(text.encode()))


def systems(case: Case) -> dict[str, Captured]:
    """All that is captured of a workload, made while others have the GPU; nothing runs yet."""
    fit, half = case.outlook.fit, case.samples // 2
    quick, mixed = quickest(fit), shared(fit)
    found = {
        "whole batch": chain(case, case.samples),
        "one wave": chain(case, half),
        "one lane": looped(case, one_lane(fit)),
        _LANES: looped(case, fit.plan_of(quick)),
    }
    if mixed is not quick:
        found[_SHARED] = looped(case, fit.plan_of(mixed))
    found[_AGAIN] = chain(case, half)
    return found


def measure(found: Found, made: dict[str, Captured], device: torch.device) -> None:
    """All forms of a workload; the GPU is ours."""
    for form, captured in made.items():
        with tried(found, form):
            captured.warm()
            if form != _AGAIN:
                num_rows = 2 if form in (_LANES, _SHARED) else 1
                found.add(form, launch_of(captured), num_rows, **told_of(captured))
            if form == _LANES:
                found.add(f"{_LANES}, with update", captured.step, 2)
    if device.type == "cuda":
        with tried(found, _APART):
            graphs = [made[form].notes.graph for form in ("one wave", _AGAIN)]
            found.add(_APART, Beside(graphs).replay, 2)


@contextmanager
def tried(found: Found, form: str) -> Iterator[None]:
    """One form that fails must not hide the others, one that never ends not the other workloads."""
    faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
    try:
        yield
    except Exception:
        found.fail(form)
    finally:
        faulthandler.cancel_dump_traceback_later()


def launch_of(captured: Captured) -> Callable[[], Any]:
    """The graph alone; on a processor a step."""
    return captured.notes.graph.replay if hasattr(captured.waves, "notes") else captured.step


def told_of(captured: Captured) -> dict[str, Any]:
    """Which calls there are, and what waits for what."""
    known: dict[str, Any] = {"calls": captured.order.sequence}
    if hasattr(captured.waves, "notes"):
        notes = captured.notes
        known |= {"nodes": notes.num_nodes, "waits": notes.waits}
    return known


def facts_of(case: Case) -> dict[str, Any]:
    """Ops of both sizes with their predicted times, what was measured of each alone, the plan."""
    fit = case.outlook.fit
    profile = fit.problem.costs.settings.get("profile")
    programs = {}
    for form, (graph, _) in zip(("whole", "wave"), case._recorded, strict=True):
        costs = with_graph(fit.problem, graph).costs
        programs[form] = {
            "signatures": graph.signatures, "signature": graph.op_signature.tolist(),
            "kind": [graph.kind_of(op) for op in range(graph.num_ops)],
            "phase": graph.op_phase.tolist(), "flops": graph.flops.tolist(),
            "bytes": graph.bytes_touched.tolist(),
            "predicted_us": [round(1e6 * seconds, 3) for seconds in costs.op_s[0].tolist()],
        }  # fmt: skip
    ways = {"whole": fit.plain, "one lane": fit.accumulated, "two lanes": quickest(fit)}
    found = {
        "programs": programs,
        "alone_us": {entry["signature"]: round(1e6 * entry["seconds"], 3)
                     for entry in profile["entries"]} if profile else {},
        "lanes": {form: way.lanes.to_data() for form, way in
                  ((_LANES, quickest(fit)), (_SHARED, shared(fit))) if way.lanes},
        "predicted_step_us": {form: 1e6 * way.step_s for form, way in ways.items()},
        "torch": str(torch.__version__), "cuda": torch.version.cuda,
    }  # fmt: skip
    if case.device.type == "cuda":
        here = torch.cuda.get_device_properties(case.device)
        found["device"] = {
            "name": here.name, "multiprocessors": here.multi_processor_count,
            "cache_bytes": here.L2_cache_size,
        }  # fmt: skip
    return found


# ── all workloads ────────────────────────────────────────────────────────────────────────────────


def one_process(options: argparse.Namespace) -> None:
    """One workload, when it is its turn."""
    device = torch.device("cpu") if options.toy else torch.device("cuda")
    turns = Turns(options.turns, options.until)
    # The runtime makes them when it makes waves.
    replayed_waves.Notes = OpenNotes
    for name, (build, samples) in (TOYS if options.toy else WORKLOADS).items():
        if options.only in name:
            case = Case(build, samples, device, int(options.cap * GIB))
            turns.prepared()
            case.price(turns)
            found = Found(name, case, turns, options.out)
            found.data |= facts_of(case)
            made = systems(case)
            with turns.turn():
                measure(found, made, device)


def main() -> int:
    """A process for each workload; then the table."""
    parser = options_of(__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=115)
    parser.add_argument("--out", type=Path, default=Path())
    options = parsed(parser)
    if options.turns:
        one_process(options)
        return 0
    options.extra = ""
    out = ("--out", str(options.out))
    asked = [name for name in (("Mixer, toy",) if options.toy else ASKED) if options.only in name]
    tasks = [Task("step_kernels.py", name, out) for name in asked] + [Task("tied_rows.py", "")]
    rows = run(tasks, options, 0.35 * options.seconds)
    if rows is not None:
        print(table_of(rows))
    return 0


def table_of(rows: Path) -> str:
    """A line per form."""
    keys = ("step_us", "ahead_us", "host_us", "kernels", "profiled_us", "sum_us", "idle_us",
            "both_us", "gap_us", "waits", "spread", "failed")  # fmt: skip
    lines = [f"| workload | form | {' | '.join(keys)} |", "|---" * (len(keys) + 2) + "|"]
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        told = [f"{v:,.2f}" if isinstance(v := row.get(key, ""), float) else str(v) for key in keys]
        lines.append(f"| {row['workload']} | {row['system']} | {' | '.join(told)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
