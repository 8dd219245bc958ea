"""Waves on two streams of a CUDA graph equal waves one after the other, to the bit."""

import copy

import pytest
import torch
from runtime.waved_models import Attends, Net

from hocket.capture.sizes import capture_sizes
from hocket.plan.files import SavedPlan
from hocket.plan.make import launched, make_problem
from hocket.plan.sections import Waves
from hocket.planners.waves.wave_search import fit_waves
from hocket.runtime.synthetic_training import SyntheticModel, SyntheticTraining
from hocket.simulate.parallel.wave_streams import pass_order


def fit_of(model, batch):
    # Recorded as on the device: other kernels would be other ops, and waves would be refused.
    graph = capture_sizes(model, batch, device="cuda")
    return fit_waves(launched(make_problem(graph, "1xv100-16g"), "replayed"), num_waves=4)


def started(fit, plan, model, batch):
    device = torch.device("cuda")
    saved = SavedPlan(fit.problem, plan)
    synthetic = SyntheticModel(copy.deepcopy(model), lambda step: batch.to(device))
    return SyntheticTraining(saved, synthetic, device).loop


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "shape"),
    [(Net(), (1024, 32)), (Attends(0.1), (16, 8, 16))],
    ids=["norm", "attention"],
)
def test_streams_of_a_cuda_graph_equal_one_after_the_other_to_the_bit(model, shape):
    batch = torch.randn(shape)
    fit = fit_of(model, batch)
    whole = len(pass_order(fit.problem.graph))
    losses = []
    for lead in (0, whole // 3, whole):
        train = started(fit, fit.plan_of(fit.aligned).having(Waves(lead=lead)), model, batch)
        torch.manual_seed(0)
        losses.append([train.step(batch.to("cuda")).item() for _ in range(8)])
        replay = train._strategy._waves.replay
        assert not replay.refusal
        assert replay.captured is not None
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.gpu
def test_captured_streams_hold_what_was_predicted():
    model, batch = Net(width=256, depth=12), torch.randn(32768, 256)
    fit = fit_of(model, batch)
    train = started(fit, fit.plan(), model, batch)
    for _ in range(6):
        train.step(batch.to("cuda"))
    assert train._strategy._waves.replay.captured is not None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["segment_pool_id"] != (0, 0)
    )
    predicted = fit.chosen.peak_bytes - int(
        fit.problem.graph.held_bytes[fit.problem.graph.tensor_producer < 0].sum()
    )
    assert held == pytest.approx(predicted, rel=0.1)
