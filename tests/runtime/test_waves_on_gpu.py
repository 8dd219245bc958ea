"""Lanes of a CUDA graph are one lane to the bit."""

import copy
from dataclasses import replace

import pytest
import torch
from runtime.waved_models import Attends, Net

from hocket.api import make_problem
from hocket.capture.sizes import capture_sizes
from hocket.plan.files import SavedPlan
from hocket.plan.sections import Lanes
from hocket.planners.waves.search import fit_waves
from hocket.planners.waves.way import hand_overs, parted, places_of
from hocket.runtime.synthetic import SyntheticTraining
from hocket.simulate.parallel import priced_at
from hocket.simulate.parallel.lanes import pass_order


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "shape"),
    [(Net(), (1024, 32)), (Attends(0.1), (16, 8, 16))],
    ids=["norm", "attention"],
)
def test_lanes_of_a_cuda_graph_are_one_lane_to_the_bit(model, shape):
    # Recorded as on the device: other kernels would be other ops, and lanes would be refused.
    batch = torch.randn(shape)
    graph = capture_sizes(model, batch, device="cuda")
    fit = fit_waves(make_problem(graph, "1xv100-16g"), num_waves=4)
    whole = len(pass_order(fit.problem.graph))
    losses = []
    apart = Lanes(lead=0, own_bytes=(1 << 20, 1 << 20))
    wave = priced_at(fit.problem, 256).graph
    places = places_of(parted(wave), 4, 2, 0.2)
    in_parts = replace(
        apart, places=tuple(map(tuple, places.tolist())), part_bytes=(1 << 20,) * 2,
        waits=hand_overs(wave, places, 4),
    )  # fmt: skip
    for lanes in (Lanes(lead=0), apart, in_parts, Lanes(lead=whole)):
        plan, own = fit.plan_of(fit.aligned).having(lanes), copy.deepcopy(model)
        device = torch.device("cuda")
        train = SyntheticTraining(
            SavedPlan(fit.problem, plan), own, lambda step: batch.to("cuda"), device
        ).loop
        torch.manual_seed(0)
        losses.append([train.step(batch.to(device)).item() for _ in range(8)])
        waves = train._strategy._waves
        assert not waves.repeats.refusal
        assert {*waves.notes.lane} == {0, 1}
    assert losses[0] == losses[1] == losses[2]
