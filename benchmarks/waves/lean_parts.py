"""Lean plans on one GPU: lanes that hand memory over in parts, beside one memory and one lane.

    PYTHONPATH=src:benchmarks/waves python benchmarks/waves/lean_parts.py [--only TEXT] [--losses 20]
    PYTHONPATH=src:benchmarks/waves python benchmarks/waves/lean_parts.py --toy   # on a processor

Every workload with the times of its single ops: one lane, two lanes in memory of each lane's own,
lean ones in one memory (which take block by block from each other) and lean ones in parts, few and
many. Rows have samples per second, waits, the peak beside the planned one and beside one wave's.
Losses of lean lanes in parts beside those of one lane, with deterministic kernels: the same bits.
"""  # noqa: E501

from __future__ import annotations

import sys
import warnings
from itertools import islice
from unittest.mock import patch

import numpy as np
import torch
from h200 import Case, System, deterministic, losses_of, one_lane, planned_of, quickest
from timing import GIB, Turns, keep_cap, options_of, parsed, row_of
from workloads import TOYS, WORKLOADS, Workload

from hocket.graph.graph import Phase
from hocket.planners.waves import way as ways
from hocket.planners.waves.search import LEAN, WaveFit
from hocket.planners.waves.way import WaveWay, best_within, handed_over
from hocket.runtime.train.waves import WaveWarning
from hocket.simulate.parallel import priced_at

_ASKED = ("ResNet-56, CIFAR, 32", "ResNet-56, CIFAR, 256")


def in_one_memory(fit: WaveFit, most_bytes: int) -> WaveWay | None:
    """The best lean lanes that take block by block from each other."""
    with patch.object(ways, "handed_over", lambda *_: iter(())):
        return best_within(fit.problem, fit.tried, most_bytes)


def systems(case: Case, most_bytes: int) -> dict[str, System]:
    """Ways to train, by name; made when they are measured."""
    fit = case.outlook.fit
    chosen = {"own memory": quickest(fit)}
    if (mixed := in_one_memory(fit, most_bytes)) is not None:
        chosen["lean, one memory"] = mixed
    in_parts = handed_over(fit.problem, fit.accumulated.shares, most_bytes)
    for way in islice(in_parts, 2):
        assert way.lanes is not None
        chosen[f"lean, {len(way.lanes.part_bytes)} parts"] = way
    found = {"one lane": System(lambda: case.ours(one_lane(fit), fit), fit.accumulated)}
    for name, way in chosen.items():
        found[name] = System(lambda way=way: case.ours(fit.plan_of(way), fit), way)  # type: ignore[misc]
    return found


def scratch(name: str, case: Case, turns: Turns) -> None:
    """The most that ops of a wave take beside what they make, forward and backward, in MiB: it
    leaves less room for parts."""
    fit = case.outlook.fit
    wave = priced_at(fit.problem, max(fit.accumulated.shares.replicas[0].microbatches)).graph
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        taken = np.sort(wave.workspace_bytes[wave.op_phase == phase])[::-1] / 2**20
        told = {
            str(rank): round(float(taken[rank]), 1) for rank in (0, 4, 16, 32) if rank < len(taken)
        }
        turns.write(name, f"scratch, {phase.name.lower()}", largest=told)


def compare(name: str, build: Workload, samples: int, turns: Turns, *, toy: bool, losses: int,
            cap: float, steps: int, times: float, wanted: list[str]) -> None:  # fmt: skip
    """All rows of a workload."""
    device = torch.device("cpu" if toy else "cuda")
    case = Case(build, samples, device, int(cap * GIB))
    case.price(turns)
    one_wave = case.outlook.fit.one_wave_bytes
    scratch(name, case, turns)
    found = systems(case, round(times * one_wave))
    for label, system in found.items():
        if not any(part in label for part in wanted):
            continue
        way = system.way
        turns.write(
            name, f"planned, {label}", predicted=way.samples_per_s, waits=way.num_waits,
            planned_gib=way.peak_bytes / GIB, one_wave=way.peak_bytes / one_wave,
        )  # fmt: skip
        row_of(turns, name, label, system.make, samples, device, steps, planned_of(way),
               told=case.tell)  # fmt: skip
    if not losses:
        return
    compared = [*[label for label in found if "parts" in label][:1], "own memory"]
    with deterministic(strict=False):
        first = losses_of(found["one lane"].make, losses)
        for label in compared:
            same = sum(
                a == b for a, b in zip(first, losses_of(found[label].make, losses), strict=True)
            )
            turns.write(name, f"losses, {label}", same_as_one_lane=f"{same} of {losses}",
                        told=case.tell())  # fmt: skip


def main() -> int:
    """Two sizes of one net."""
    parser = options_of(__doc__.splitlines()[0])
    parser.add_argument("--losses", type=int, default=20, help="steps whose losses are compared")
    parser.add_argument("--times", type=float, default=LEAN, help="what one wave holds, at most")
    options = parsed(parser)
    warnings.simplefilter("always", WaveWarning)
    keep_cap(options)
    asked = {name: WORKLOADS[name] for name in _ASKED}
    for name, (build, samples) in (TOYS if options.toy else asked).items():
        if options.only in name:
            compare(name, build, samples, Turns(options.turns, options.until), toy=options.toy,
                    losses=options.losses, cap=options.cap, steps=options.steps,
                    times=options.times, wanted=options.systems.split(";"))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
