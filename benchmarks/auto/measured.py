"""Plans measured on processes of different speed: do winners win, and is the prediction right?

    PYTHONPATH=src:tests python benchmarks/auto/measured.py [--slow 20,40,60] [--steps 6]

Ranks of gloo on this machine stand for devices of different speed: after each pass a rank sleeps
until as many times have gone by as it is slower than a core, which is as quick as it was seen at
its best, so that what else the machine does matters little. Ops of the step are timed here first,
as `hocket profile` does it, at a few sizes; fits to these times, each as many times as long, are
the kinds of a cluster. Ways to share the batch are then predicted by the simulator and carried out
in a person's loop by `hocket.prepare`. Prints both, the part of pairs more than 10 % apart whose
order is kept, and how far predictions are off.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import forked
import torch
from torch import nn

import hocket
from hocket.capture.model import capture_program
from hocket.capture.sizes import capture_sizes
from hocket.cost.calibrate import Calibration, calibrate
from hocket.cost.measure import profile_program
from hocket.cost.profile import (
    Profile,
    ProfileEntry,
    merge_profiles,
    profile_from_dict,
    profile_to_dict,
)
from hocket.hardware.cluster import Cluster
from hocket.hardware.shorthand import cluster_from_text
from hocket.plan.files import read_plan, write_plan
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel, Replica
from hocket.plan.words import in_words
from hocket.planners.parallel.compare import compare_parallel
from hocket.runtime.strategies.pipeline import Pipeline, SegmentRun
from hocket.runtime.strategies.stage_program import StageProgram
from hocket.runtime.strategies.traced import TracedModel
from hocket.simulate import simulate

BATCH, ROWS, WIDTH, LAYERS = 24, 16, 640, 6
"""Large enough that what Python does between two ops is little of a pass."""
SIZES = (24, 12, 6, 3)
PROFILE_S, TIMES = 6.0, 3
"""For the ops of one size, and how often."""
UNSLOWED = 12
"""Steps in which the speed of a core at its best is found."""
KIND = """
[kinds.slow{number}]
memory = "8GiB"
memory_bandwidth = "{bandwidth:.0f}B/s"
peak = {{ float32 = "{flops:.0f}FLOP/s" }}
launch = "{launch:.9f}s"
cpu = true
host_link = {{ bandwidth = "10GB/s", latency = "0s" }}
source = "measured"

[[devices]]
kind = "slow{number}"
name = "d{number}"
"""


def model() -> nn.Module:
    """Equal layers."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 8))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A mean over samples."""
    found: torch.Tensor = model(x).square().mean()
    return found


def batch() -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(BATCH, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def prepared(own: nn.Module, plan: Any = None) -> Any:
    """The loop of one rank."""
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-3)
    given = {} if plan is None else {"plan": plan}
    return hocket.prepare(own, optimizer, batch(), forward=loss_of, **given)


def profiled(tell: Callable[[Any], None]) -> dict[str, Any]:
    """Seconds of the step's ops on one core here, at a few sizes."""
    torch.set_num_threads(1)
    own, kind = model(), cluster_from_text("1xcpu-core").kinds[0]
    for _ in range(UNSLOWED):
        loss_of(own, batch()).backward()  # a processor that has slept is slow at first
    found = []
    for size in SIZES:
        graph, program = capture_program(
            own, batch()[:size], forward=loss_of, device="cpu",
            optimizer=torch.optim.SGD(own.parameters(), lr=1e-3),
        )  # fmt: skip
        found.append(_at_best([
            profile_program(graph, program, kind, budget_s=PROFILE_S) for _ in range(TIMES)
        ]))  # fmt: skip
    return profile_to_dict(merge_profiles(found))


def _at_best(profiles: Sequence[Profile]) -> Profile:
    """Each op as quick as it was seen at its best, as the processes are slowed by it."""
    best: dict[str, ProfileEntry] = {}
    for entry in (entry for profile in profiles for entry in profile.entries):
        known = best.get(entry.signature, entry)
        best[entry.signature] = min(known, entry, key=lambda each: each.seconds)
    entries = tuple(best[signature] for signature in sorted(best))
    return replace(profiles[0], entries=entries)


def slowed(
    function: Callable[..., Any],
    times: float,
    is_slow: threading.Event,
    key_of: Callable[..., object],
) -> Callable[..., Any]:
    """A function that takes as many times as long as it computes when nothing disturbs it.

    How long that is is found before it is slow, for all calls of the same key together.
    """
    least_s: dict[object, float] = {}

    def called(*args: Any, **kwargs: Any) -> Any:
        began_s, started = time.perf_counter(), time.thread_time()
        found = function(*args, **kwargs)
        key = key_of(*args)
        least_s[key] = min(least_s.get(key, 1e9), time.thread_time() - started)
        if is_slow.is_set():
            time.sleep(max(0.0, times * least_s[key] - (time.perf_counter() - began_s)))
        return found

    return called


def slow_down(times: float) -> threading.Event:
    """Let all that computes in this process be slow, once the event is set."""
    is_slow = threading.Event()
    for owner, name, key_of in (
        (TracedModel, "train", lambda own, rows, *_: (id(own), len(rows))),
        (StageProgram, "run", lambda own, segment, *_: (id(own), segment)),
        # Gradients of a stage's microbatches are added up here.
        (
            SegmentRun,
            "_take_results",
            lambda run, traced, segment, number: (segment, number > 0),
        ),
        (TracedModel, "update", lambda *_: None),
        (Pipeline, "update", lambda *_: None),
    ):
        setattr(owner, name, slowed(getattr(owner, name), times, is_slow, key_of))
    return is_slow


def measure(tell: Callable[[Any], None], slow: Sequence[float], path: str, steps: int) -> float:
    """One rank: the least seconds of a step under a plan."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    saved = read_plan(path)
    names = list(saved.problem.cluster.device_names)
    own = names.index(saved.plan[Parallel].devices[rank])
    is_slow = slow_down(slow[own])
    train, seconds = prepared(model(), saved), []
    for _ in range(UNSLOWED):
        train.step(batch())
    is_slow.set()
    for _ in range(steps):
        started = time.perf_counter()
        train.step(batch())
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def kinds_text(slow: Sequence[float]) -> str:
    """Devices like a core, each as slow as it is."""
    kinds = [KIND.format(number=n, bandwidth=20e9 / times, flops=80e9 / times, launch=2e-6 * times)
             for n, times in enumerate(slow)]  # fmt: skip
    pairs = ", ".join(f'["d{a}", "d{b}"]' for a, b in combinations(range(len(slow)), 2))
    links = f'[[links]]\nbetween = [{pairs}]\nbandwidth = "1GB/s"\nlatency = "200us"\n'
    return 'name = "processes"\n' + "".join(kinds) + (links if pairs else "")


def fitted(profile: Profile, cluster: Cluster, slow: Sequence[float]) -> Calibration:
    """What each kind reaches, by what the ops took here and how slow it is."""
    fits = {}
    for kind, times in zip(cluster.kinds, slow, strict=True):
        entries = tuple(replace(e, seconds=e.seconds * times) for e in profile.entries)
        own = replace(profile, device_kind=kind.name, entries=entries)
        fits |= calibrate(own, kind).kinds
    return Calibration(fits, "ops timed on one core")


def ways(problem: Problem) -> list[Parallel]:
    """The winner of the search, what people do by hand, and single devices."""
    found = {}
    for candidate in compare_parallel(problem).candidates:
        shares = None if candidate.plan is None else candidate.plan.get(Parallel)
        if shares is not None and candidate.feasible and not shares.sharded:
            found[in_words(shares)] = shares
    names = problem.cluster.device_names
    by_hand = [
        Parallel(replicas=(Replica(devices=(name,), microbatches=(BATCH,)),)) for name in names
    ]
    half = BATCH // 2
    by_hand.append(Parallel(replicas=tuple(
        Replica(devices=(name,), microbatches=(half,)) for name in names[:2]
    )))  # fmt: skip
    by_hand.append(Parallel(replicas=tuple(
        Replica(devices=(name,), microbatches=(size,))
        for name, size in zip(names[:2], (2 * BATCH // 3, BATCH // 3), strict=True)
    )))  # fmt: skip
    return [*found.values(), *(s for s in by_hand if in_words(s) not in found)]


def main() -> None:
    """Predict and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", default="20,40,60")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    slow = [float(text) for text in options.slow.split(",")]
    (times,) = forked.answers(1, profiled)
    profile = profile_from_dict(times, "profile")
    own = model()
    graph = capture_sizes(
        own, batch(), forward=loss_of, optimizer=torch.optim.SGD(own.parameters(), lr=1e-3),
        device="cpu",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "processes.toml"
        file.write_text(kinds_text(slow))
        cluster = cluster_from_text(str(file))
        problem = make_problem(graph, cluster, calibration=fitted(profile, cluster, slow))
        rows = []
        for number, shares in enumerate(ways(problem)):
            plan = Plan(planner="shares").having(shares)
            predicted_s = simulate(problem, plan).makespan_s
            path = Path(folder) / f"{number}.json"
            write_plan(path, problem, plan.claiming(step_s=predicted_s))
            count = len(shares.devices)
            found = forked.answers(count, measure, slow, str(path), options.steps)
            measured_s = max(found)
            rows.append((predicted_s, measured_s))
            told = f"{predicted_s:8.3f} s predicted {measured_s:8.3f} s measured"
            print(f"{told} ({measured_s / predicted_s - 1:+.0%})  {in_words(shares)}", flush=True)
    apart = [(a, b) for a, b in combinations(rows, 2) if abs(a[1] / b[1] - 1) > 0.1]
    kept = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in apart)
    errors = sorted(abs(m / p - 1) for p, m in rows)
    print(f"order kept in {kept} of {len(apart)} pairs more than 10 % apart; errors: median "
          f"{errors[len(errors) // 2]:.0%}, largest {errors[-1]:.0%}")  # fmt: skip


if __name__ == "__main__":
    main()
