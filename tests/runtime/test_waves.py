"""Waves equal accumulation to the bit, and hold what was planned."""

import copy
import warnings
from itertools import pairwise

import forked
import pytest
import torch
from runtime import wave_ranks
from runtime.waved_models import Attends, Net, accumulated, fitted
from torch import nn

import hocket
from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.base.units import format_bytes
from hocket.capture.perform import draw_seed
from hocket.capture.sizes import capture_sizes
from hocket.graph.graph import Phase
from hocket.plan.files import SavedPlan
from hocket.plan.make import launched, make_problem
from hocket.plan.sections import Parallel, Replica, Waves
from hocket.planners.waves.wave_search import even_split, fit_waves, reasons
from hocket.runtime.placed_step import DeviceStream
from hocket.runtime.planned_model import ModelSource
from hocket.runtime.run import run_plan
from hocket.runtime.run_options import RunOptions
from hocket.runtime.strategies.waves import WaveStep, WaveWarning, wave_order
from hocket.simulate.parallel.wave_streams import pass_order
from hocket.view.measured import run_table
from hocket.view.table import plain


@pytest.fixture(scope="module")
def case():
    return fitted(depth=3)


def test_waves_are_accumulation_to_the_bit(case):
    model, batch, fit = copy.deepcopy(case[0]), case[1], case[2]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # batch norm sees microbatches
        plan = SavedPlan(fit.problem, fit.plan_of(fit.smallest))
        train = hocket.prepare(model, optimizer, batch, plan=plan, seed=0)
    losses, state = accumulated(case)
    assert [train.step(batch).item() for _ in losses] == losses
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dropped", [0.0, 0.1])
def test_waves_with_attention_are_accumulation_to_the_bit(dropped):
    torch.manual_seed(0)
    model, batch = Attends(dropped), torch.randn(16, 8, 16)
    fit = fit_waves(make_problem(capture_sizes(model, batch), "1xv100-16g"), num_waves=4)
    graph = fit.problem.graph
    drawn = [graph.op_names[op] for op in (graph.rng_order >= 0).nonzero()[0]]
    assert len(drawn) == len(model.mixes) * (1 + bool(dropped))
    assert not any("backward" in name for name in drawn)
    losses, state = accumulated((model, batch))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    plan = SavedPlan(fit.problem, fit.plan_of(fit.aligned))
    train = hocket.prepare(model, optimizer, batch, plan=plan, seed=0)
    assert [train.step(batch).item() for _ in losses] == losses
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("start", [0.0, 0.5])
def test_whenever_the_second_wave_begins_losses_are_the_same(case, start):
    model, batch, fit = case
    lead = round(start * len(pass_order(fit.problem.graph)))
    plan = fit.plan_of(fit.smallest).having(Waves(lead=lead))
    source = ModelSource(model, batch, None)
    result = run_plan(fit.problem, plan, RunOptions(steps=3, threads=1), source=source)
    assert list(result.losses) == accumulated(case)[0]
    told = plain(run_table(fit.problem, plan, result))
    assert "peak: predicted" in told
    assert format_bytes(result.peak_bytes["gpu0"]) in told


class Looks(nn.Module):
    """Looks at its weights in another way where they lie in one storage, as cuDNN's layers do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def forward(self, rows):
        for layer in self.layers:
            weight = layer.weight
            if weight.storage_offset():
                weight = weight.flatten().view(weight.shape)
            rows = nn.functional.linear(rows, weight, layer.bias).relu()
        return rows.pow(2).mean()


def in_one_storage(model):
    """The same model, its parameters views of one flat tensor."""
    model = copy.deepcopy(model)
    parameters = [*model.parameters()]
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part.view(parameter.shape)
    return model


def test_views_of_parameters_that_lie_otherwise_leave_waves_on_two_streams():
    torch.manual_seed(0)
    model, batch = Looks(), torch.randn(64, 16)
    fit = fit_waves(make_problem(capture_sizes(model, batch), "1xv100-16g"), num_waves=4)
    flat = in_one_storage(model)
    graphs = [capture_sizes(each, batch) for each in (model, flat)]
    views = [int(graph.only_looks.sum()) for graph in graphs]
    assert views[0] < views[1]
    assert graphs[1].num_ops - graphs[0].num_ops == views[1] - views[0]
    optimizer = torch.optim.AdamW(flat.parameters(), lr=1e-3, fused=True)
    plan = SavedPlan(fit.problem, fit.plan_of(fit.smallest))
    with warnings.catch_warnings():
        warnings.simplefilter("error", WaveWarning)
        train = hocket.prepare(flat, optimizer, batch, plan=plan, seed=0)
        losses, state = accumulated((model, batch))
        assert [train.step(batch).item() for _ in losses] == losses
    assert all(torch.equal(value, state[name]) for name, value in flat.state_dict().items())


def between_waves(case, num_waves=4, steps=3):
    """The published form in plain PyTorch: each stream has a twin, every wave changes the model."""
    model, batch = copy.deepcopy(case[0]), case[1]
    twins = [copy.deepcopy(model) for _ in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    before, losses, buffers = None, [], dict(model.named_buffers())
    for step in range(1, steps + 1):
        torch.manual_seed(draw_seed(0, step, 0))
        parts = []
        for number, rows in enumerate(batch.chunk(num_waves)):
            twin = twins[number % 2]
            for name, buffer in twin.named_buffers():
                buffer.copy_(buffers[name])
            loss = twin(rows)
            made = torch.autograd.grad(loss, list(twin.parameters()))
            for name, buffer in twin.named_buffers():
                buffers[name].copy_(buffer)
            for parameter, *pair in zip(model.parameters(), made, before or made, strict=True):
                parameter.grad = pair[0] if before is None else (pair[1] + pair[0]) / 2
            optimizer.step()
            twin.load_state_dict(model.state_dict())
            before = made
            parts.append(loss.detach() / num_waves)
        losses.append(torch.stack(parts).sum(0).item())
    return losses, model.state_dict()


def test_parameters_can_change_after_every_wave_as_published(case):
    model, batch = copy.deepcopy(case[0]), case[1]
    fit = fit_waves(case[2].problem, num_waves=4, changes="wave")
    held = sum(p.numel() * 4 for p in model.parameters())
    assert fit.aligned.peak_bytes == case[2].aligned.peak_bytes + 3 * held
    assert any("4 updates instead of one" in why for why in reasons(fit))
    updates_s = fit.problem.costs.op_s[0, fit.problem.graph.op_phase == Phase.OPTIMIZER].sum()
    # Some of them run beside the end of the other stream.
    more_s = fit.aligned.step_s - case[2].aligned.step_s
    assert 2 * updates_s < more_s <= 3 * updates_s * (1 + 1e-9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    plan = SavedPlan(fit.problem, fit.plan_of(fit.smallest))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # batch norm sees microbatches
        train = hocket.prepare(model, optimizer, batch, plan=plan, seed=0)
    first = copy.deepcopy(train.state_dict())
    losses, state = between_waves(case)
    assert [train.step(batch).item() for _ in losses] == losses
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert losses != accumulated(case)[0]
    with pytest.raises(UsageError, match="no gradients to accumulate"):
        train.step(batch, accumulate=True)
    # From a loaded state both streams start with its parameters.
    train.load_state_dict(first)
    assert train.step(batch).item() == losses[0]


def test_replicas_sum_the_gradients_of_every_wave_that_updates():
    for rank in forked.answers(2, wave_ranks.differences):
        assert rank["loss"] < 1e-12
        assert rank["weights"] < 1e-12


class WatchedStream(DeviceStream):
    """Its events say which op was run last; knows what it has waited for."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.last, self.waited = None, set()

    def event(self):
        return self.last

    def wait(self, event):
        self.waited.add(event)


def test_an_op_waits_for_what_it_needs_of_the_other_stream(case, monkeypatch):
    model, batch, fit = copy.deepcopy(case[0]), case[1], case[2]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # batch norm sees microbatches
        plan = SavedPlan(fit.problem, fit.plan_of(fit.smallest))
        train = hocket.prepare(model, optimizer, batch, plan=plan, seed=0)
    waves = train._strategy._waves
    streams = waves._streams = [WatchedStream(), WatchedStream()]
    sequence, early, run_op = iter(waves._order.sequence), [], WaveStep.run_op

    def run(own, op):
        at = next(sequence)
        stream = streams[at.wave % 2]
        if at in waves._order.waits:
            early.extend({waves._order.waits[at]} - stream.waited)
        run_op(own, op)
        stream.last = at

    monkeypatch.setattr(WaveStep, "run_op", run)
    train.step(batch)
    assert waves._order.waits
    assert early == []


def test_streams_take_turns_and_their_waves_follow_each_other(case):
    found = case[2].smallest
    sequence = wave_order(case[2].problem, found.parallel, found.waves).sequence
    streams = [wave % 2 for wave, _ in sequence]
    assert sum(a != b for a, b in pairwise(streams)) > len(streams) // 4
    for stream in (0, 1):
        waves = [wave for wave, _ in sequence if wave % 2 == stream]
        assert waves == sorted(waves)


def test_a_run_holds_what_was_planned():
    # So deep that a result of one op, which a CPU makes when that of the other stream is gone and
    # two streams may make at once, is little of all.
    model, batch, fit = fitted(depth=10)
    for way in (fit.smallest, fit.aligned):
        result = run_plan(
            fit.problem, fit.plan_of(way), RunOptions(steps=2, threads=1),
            source=ModelSource(model, batch, None),
        )  # fmt: skip
        (measured,) = result.peak_bytes.values()
        assert measured == pytest.approx(way.peak_bytes, rel=0.02)


def test_a_run_on_a_cpu_is_compared_with_the_joint_peak_and_reports_the_gpus():
    model, batch, fit = fitted(depth=8)
    fit = fit_waves(launched(fit.problem, "replayed"), num_waves=4)
    plan, way = fit.plan(), fit.chosen
    assert way.waves.separate_bytes > 0.02 * way.peak_bytes
    result = run_plan(
        fit.problem, plan, RunOptions(steps=2, threads=1), source=ModelSource(model, batch, None)
    )
    (measured,) = result.peak_bytes.values()
    lived = way.peak_bytes - way.waves.separate_bytes
    assert result.predicted.peak_bytes.max() == lived
    assert measured == pytest.approx(lived, rel=0.02)
    told = " ".join(plain(run_table(fit.problem, plan, result)).split())
    assert f"on a GPU {format_bytes(way.peak_bytes)} are planned" in told


def test_a_budget_beside_a_plan_of_waves_is_refused(case):
    model, batch, fit = case
    plan = SavedPlan(fit.problem, fit.plan())
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UsageError, match="a plan that is given cannot follow"):
        hocket.prepare(model, optimizer, batch, plan=plan, memory="1MiB")


def test_a_budget_beside_a_config_of_one_device_is_refused(case):
    model, batch, _ = case
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UsageError, match="a plan that is given cannot follow"):
        hocket.prepare(model, optimizer, batch, plan=hocket.ParallelConfig(), memory="1GiB")


def test_waves_are_asked_for_in_python(case):
    model, batch, fit = copy.deepcopy(case[0]), case[1], case[2]
    found = hocket.waves(model, batch, "1xv100-16g", num_waves=4, launches="eager")
    assert (found.pays, found.gain) == (fit.pays, fit.gain)
    assert found.plan()[Waves] == fit.plan()[Waves]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # batch norm sees microbatches
        train = hocket.prepare(model, optimizer, batch, plan=found.planned, seed=0)
    assert train.step(batch).item() == accumulated(case)[0][0]
    with pytest.raises(NoFeasiblePlanError, match="do not fit into"):
        hocket.waves(model, batch, "1xv100-16g", "64KiB").plan()
    with pytest.raises(UsageError, match="launches"):
        hocket.waves(model, batch, "1xv100-16g", launches="eagerly")


def test_waves_of_several_devices_are_for_a_launcher(case):
    problem = make_problem(case[2].problem.graph, "2xv100-16g")
    shares = even_split(problem, 2)
    assert [replica.microbatches for replica in shares.replicas] == [(256, 256), (256, 256)]
    plan = fit_waves(problem).plan()
    with pytest.raises(UsageError, match="one process per device"):
        run_plan(problem, plan, RunOptions())


def test_another_model_is_refused(case):
    _, batch, fit = case
    other = Net(depth=2)
    optimizer = torch.optim.AdamW(other.parameters())
    with pytest.raises(UsageError, match="the plan is for a model with"):
        hocket.prepare(other, optimizer, batch, plan=SavedPlan(fit.problem, fit.plan()))


def test_waves_without_microbatches_are_no_plan(case):
    problem = case[2].problem
    name = problem.cluster.device_names[0]
    whole = Parallel(replicas=(Replica(devices=(name,), microbatches=(1024,)),))
    found = list(Waves(lead=1).verify(problem, case[2].plan().having(whole)))
    assert "two microbatches or more" in found[0].message
