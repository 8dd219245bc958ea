"""Two waves beside accumulation in plain PyTorch: the models of the zoo, small, bit for bit.

    PYTHONPATH=src:tests .venv/bin/python benchmarks/waves/equality.py [--steps 5] [--only NAME]

Every model trains on one batch in two microbatches: by a plan of two waves, once with the second
wave begun where both hold least and once with both begun together, and in plain PyTorch one after
the other. Losses, weights and buffers have to be the same bits. Beside it stands what was planned
and what was measured (storages counted on the processor), and the peak of one wave.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from typing import Any

import torch
from runtime.small_zoo import SMALL_ZOO

from hocket.base.errors import UsageError
from hocket.capture.loss import ChosenLoss
from hocket.capture.optimizer import optimizer_of_meta
from hocket.capture.perform import draw_seed
from hocket.capture.sizes import capture_sizes
from hocket.capture.step import apply_model
from hocket.plan.files import SavedPlan
from hocket.plan.make import make_problem
from hocket.planners.waves.wave_candidate import WaveCandidate
from hocket.planners.waves.wave_search import WaveFit, fit_waves
from hocket.runtime.offload.memory_tracker import MemoryTracker
from hocket.runtime.planned_optimizer import torch_optimizer
from hocket.runtime.strategies.batch_split import microbatches
from hocket.runtime.synthetic_training import SyntheticModel, SyntheticTraining


def doubled(batch: Any) -> Any:
    """The batch twice, so that each wave has as many samples as the small model comes with."""
    rows = {id(t): torch.cat((t, t)) if t.dim() else t for t in batch.values()}
    return {name: rows[id(tensor)] for name, tensor in batch.items()}


def accumulated(model: Any, batch: Any, fit: WaveFit, steps: int) -> list[float]:
    """Losses of the microbatches one after the other."""
    update = optimizer_of_meta(fit.problem.graph.meta)
    assert update is not None
    optimizer, loss_of = torch_optimizer(update, list(model.parameters())), ChosenLoss(None)
    parts, shares = microbatches(batch, fit.accumulated.parallel.replicas[0].microbatches, None)
    losses = []
    for step in range(1, steps + 1):
        torch.manual_seed(draw_seed(0, step, 0))
        found = []
        for part, share in zip(parts, shares, strict=True):
            loss = loss_of(apply_model(model, part))
            (loss * share).backward()
            found.append(loss.detach() * share)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(torch.stack(found).sum(0).item())
    return losses


def waved(
    model: Any, batch: Any, fit: WaveFit, candidate: WaveCandidate, steps: int
) -> tuple[list[float], int]:
    """Losses in two streams, and the most that was held in the second step."""
    plan = fit.plan_of(candidate)
    synthetic = SyntheticModel(model, lambda step: batch)
    train = SyntheticTraining(SavedPlan(fit.problem, plan), synthetic, torch.device("cpu")).loop
    tracker, losses = MemoryTracker(), []
    with tracker:
        tracker.track((*model.parameters(), *model.buffers()))
        for step in range(1, min(steps, 2) + 1):
            torch.manual_seed(draw_seed(0, step, 0))
            losses.append(train.step(batch).item())
    for step in range(3, steps + 1):
        torch.manual_seed(draw_seed(0, step, 0))
        losses.append(train.step(batch).item())
    return losses, tracker.peak_bytes


def main() -> int:
    """A line per model; exit code 6 where bits differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("| model | ops | lead | same bits | planned | measured / planned | one wave | aligned |")
    print("|---|---|---|---|---|---|---|---|")
    num_wrong = 0
    for name, build in SMALL_ZOO.items():
        if options.only not in name:
            continue
        torch.manual_seed(0)
        model, batch = build()
        batch = doubled(batch)
        try:
            graph = capture_sizes(model, batch, device="cpu")
            fit = fit_waves(make_problem(graph, "1xv100-16g"))
        except UsageError as error:
            print(f"| {name} | refused: {error.message} |", flush=True)
            continue
        plain = copy.deepcopy(model)
        losses = accumulated(plain, batch, fit, options.steps)
        for candidate in (fit.smallest, fit.aligned):
            mine = copy.deepcopy(model)
            found, peak = waved(mine, batch, fit, candidate, options.steps)
            states = zip(plain.state_dict().values(), mine.state_dict().values(), strict=True)
            is_same = found == losses and all(torch.equal(a, b) for a, b in states)
            num_wrong += not is_same
            assert candidate.waves is not None
            one = fit.one_wave_bytes
            print(
                f"| {name} | {fit.problem.graph.num_ops} | {candidate.waves.lead} | "
                f"{'yes' if is_same else 'NO'} | {candidate.peak_bytes} | "
                f"{peak / candidate.peak_bytes:.3f} | "
                f"{candidate.peak_bytes / one:.2f} x | {fit.aligned.peak_bytes / one:.2f} x |",
                flush=True,
            )
    return 6 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
