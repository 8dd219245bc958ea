"""Plans that divide a model or share out its batch, carried by a person's module."""

from __future__ import annotations

from dataclasses import replace

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Lanes, PlacedDivision, Schedule, Shares
from hocket.plan.training import TransformerTraining
from hocket.runtime.train.carrier import Carrier
from hocket.runtime.train.divided.build import (
    DividedTask,
    divided_carrier,
    require_batch,
    require_layers,
)
from hocket.runtime.train.divided.of_shares import shared_carrier
from hocket.runtime.train.divided.shares import num_rows
from hocket.runtime.train.predicted import predicted_s
from hocket.transformer import Division


def divides(plan: Plan) -> bool:
    """Whether a plan divides a training, rather than placing single ops."""
    return plan.get(PlacedDivision) is not None or plan.get(Shares) is not None


def carried_plan(task: DividedTask, problem: Problem, plan: Plan) -> Carrier:
    """What carries such a plan; refuses another model or batch than the planned one."""
    task = replace(task, predicted_s=predicted_s(problem, plan, task.device))
    shares = plan.get(Shares)
    if shares is not None:
        require_batch(shares.num_samples, task.batch)
        return shared_carrier(task, problem, shares, plan.get(Lanes), plan.get(Communication))
    division = plan[PlacedDivision].division
    if isinstance(problem.work, TransformerTraining):
        require_layers(task.model, problem.training.model.layers)
    require_batch(division.global_batch, task.batch)
    return divided_carrier(task, division, plan.get(Schedule), accumulates=True)


def carried_division(task: DividedTask, division: Division) -> Carrier:
    """What carries degrees that a person states; who states nothing else means the batch given.

    A microbatch is one sample where nobody said anything, so only pipelines take several.
    """
    if division.global_batch == 1 and division.shares is None:
        division = replace(division, global_batch=num_rows(task.batch))
    require_batch(division.global_batch, task.batch)
    return divided_carrier(task, division, None, accumulates=False)
