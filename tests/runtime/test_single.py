"""A placed step in one process computes what the unsplit model computes, bit for bit."""

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime.executed_program import named_tensors
from runtime.models import STEPS, LateWrite, Patchwork, shared_storages
from runtime.placements import random_placement
from runtime.plain_reference import reference_steps
from runtime.small_zoo import SMALL_ZOO
from runtime.whole_step import WholeStep
from simulate.problems import joined, problem_of

from hocket.base.errors import RunError
from hocket.capture import ZOO, capture_program
from hocket.runtime.device_instructions import Setup, split
from hocket.runtime.step_record import measured_timeline
from hocket.simulate.engine import lower
from hocket.simulate.verify import update_violations

CPU = torch.device("cpu")
NUM_DEVICES = 3
NUM_STEPS = 3


def place(model, batch, seed, optimizer="adamw", device="cpu", num_devices=NUM_DEVICES):
    graph, program = capture_program(model, batch, optimizer=optimizer, device=device)
    device_of = random_placement(graph, num_devices, seed)
    problem = problem_of(graph, joined(num_devices), 1.0)
    assert not list(update_violations(device_of, problem))
    parts = split(graph, lower(problem, device_of))
    return Setup(graph, program, device_of, parts)


def run_single(setup, model, batch, steps, seed=5):
    process = WholeStep(setup, named_tensors(model, batch), [CPU] * NUM_DEVICES, seed=seed)
    return process, [process.step(number) for number in range(1, steps + 1)]


def assert_same(setup, results, losses, reference):
    program = setup.program
    assert losses == reference.losses
    gradients = {program.names[p]: results[g] for p, g in program.gradients.items()}
    assert gradients.keys() == reference.gradients.keys()
    for name, expected in reference.gradients.items():
        assert torch.equal(gradients[name], expected), f"gradient of {name}"
    for tensor, name in program.names.items():
        if name in reference.state:
            assert torch.equal(results[tensor], reference.state[name]), name


@pytest.mark.parametrize("name", SMALL_ZOO)
def test_placed_model_equals_the_unsplit_one(name):
    torch.manual_seed(1)
    model, batch = SMALL_ZOO[name]()
    model.train()
    setup = place(model, batch, seed=len(name))
    assert len(setup.split.transfers) > 0
    process, records = run_single(setup, model, batch, NUM_STEPS)
    reference = reference_steps(model, batch, steps=NUM_STEPS, seed=5)
    assert_same(setup, process.results(), [record.loss for record in records], reference)


def test_small_zoo_is_the_whole_zoo():
    assert SMALL_ZOO.keys() == ZOO.keys()


@given(
    st.lists(st.sampled_from(STEPS), min_size=1, max_size=6),
    st.integers(0, 1000),
    st.sampled_from(["adamw", "sgd"]),
)
@settings(derandomize=True, deadline=None, max_examples=40)
def test_models_that_write_in_place_are_right_on_any_placement(steps, seed, optimizer):
    torch.manual_seed(seed)
    model, batch = Patchwork(steps), {"x": torch.randn(4, 4)}
    setup = place(model, batch, seed, optimizer)
    process, records = run_single(setup, model, batch, 2, seed)
    reference = reference_steps(model, batch, steps=2, seed=seed, optimizer=optimizer)
    assert_same(setup, process.results(), [record.loss for record in records], reference)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", shared_storages())
def test_tensors_that_share_a_storage_or_a_name_stay_what_they_are(name, seed):
    torch.manual_seed(seed)
    model, batch = shared_storages()[name]
    before = {name: value.clone() for name, value in named_tensors(model, batch).items()}
    setup = place(model, batch, seed)
    process, records = run_single(setup, model, batch, 3)
    for name, value in named_tensors(model, batch).items():
        assert torch.equal(value, before[name]), f"{name} of the user was changed"
    reference = reference_steps(model, batch, steps=3, seed=5)
    assert_same(setup, process.results(), [record.loss for record in records], reference)


@pytest.mark.parametrize("seed", range(6))
def test_a_view_that_is_returned_has_seen_the_last_write(seed):
    model, batch = LateWrite(), torch.ones(3, 2)
    setup = place(model, batch, seed, optimizer=None)
    process, _ = run_single(setup, model, batch, 1)
    (output,) = setup.program.outputs
    assert torch.equal(process.results()[output], torch.full((6,), 2.0))


def test_default_adamw_gives_the_same_losses_to_a_millionth():
    torch.manual_seed(0)
    model, batch = SMALL_ZOO["mlp"]()
    setup = place(model, batch, seed=0)
    _, records = run_single(setup, model, batch, 5)
    update = torch.optim.AdamW(model.parameters())
    for record in records:
        update.zero_grad()
        loss = model(**batch)
        loss.backward()
        update.step()
        assert record.loss == pytest.approx(loss.item(), rel=1e-6)


def test_a_step_leaves_no_tensor_behind():
    torch.manual_seed(0)
    model, batch = SMALL_ZOO["gpt2"]()
    setup = place(model, batch, seed=3)
    process, _ = run_single(setup, model, batch, 1)
    gc.collect()
    before = [held.num_bytes for held in process.held.values()]
    tensors = [len(held) for held in process.held.values()]
    process.step(2)
    assert [held.num_bytes for held in process.held.values()] == before
    assert [len(held) for held in process.held.values()] == tensors
    kept = {t for present in setup.split.present for t in present}
    kept |= {*setup.program.gradients.values(), *setup.program.outputs}
    roles = {int(setup.graph.tensor_role[t]) for t in process.results() if t not in kept}
    assert roles <= {int(setup.graph.tensor_role[t]) for t in setup.program.gradients.values()}


def test_measured_timeline_has_the_form_of_a_simulated_one():
    torch.manual_seed(0)
    model, batch = SMALL_ZOO["lstm"]()
    setup = place(model, batch, seed=1)
    _, (record,) = run_single(setup, model, batch, 1)
    device_of = np.array(setup.device_of, dtype=np.int32)
    timeline = measured_timeline(record, device_of, setup.split.transfers, NUM_DEVICES)
    assert np.all(timeline.op_start_s >= 0)
    assert np.all(timeline.op_end_s >= timeline.op_start_s)
    assert timeline.op_end_s.max() <= timeline.makespan_s
    assert np.all(np.diff(timeline.transfer_start_s) >= 0)
    assert len(timeline.transfer_tensor) == len(setup.split.transfers)
    keys = zip(timeline.transfer_tensor.tolist(), timeline.transfer_dst.tolist(), strict=True)
    arrives = dict(zip(keys, timeline.transfer_start_s.tolist(), strict=True))
    for op in range(setup.graph.num_ops):
        for tensor in setup.graph.reads_of(op).tolist():
            start = arrives.get((tensor, setup.device_of[op]), 0.0)
            assert start <= timeline.op_start_s[op]
    for device in range(NUM_DEVICES):
        time_s, held = timeline.memory_curve(device)
        assert time_s[0] == 0
        assert np.all(np.diff(time_s) > 0)
        assert held.max() <= timeline.peak_bytes[device]


def test_an_op_that_fails_is_named():
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Linear(2, 2))
    batch = torch.tensor([1, 7])
    setup = place(model, batch, seed=0)
    with pytest.raises(RunError, match=r"op '0/embedding' failed on cpu in step 1: IndexError"):
        run_single(setup, model, batch, 1)


def test_inference_returns_the_outputs_of_the_model():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).eval()
    batch = torch.randn(3, 4)
    setup = place(model, batch, seed=0, optimizer=None)
    process, (record,) = run_single(setup, model, batch, 1)
    assert record.loss is None
    (output,) = setup.program.outputs
    assert torch.equal(process.results()[output], model(batch))
