"""Steps within a budget that are launched as a whole: which ones, when, and that they train alike.

Without a GPU, what stands for a CUDA graph makes the captured calls again, on what was captured.
"""

import copy
from dataclasses import replace

import pytest
import torch
from runtime.budget_loops import CPU, loop_of, task_of
from runtime.budget_models import MODELS
from runtime.train_loops import adamw, assert_same_state
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hocket
from hocket.plan.sections import Memory, MemoryBlock
from hocket.runtime.offload.budget_graph import MIN_REPLAYS, BudgetGraph
from hocket.runtime.offload.dry_run import DryRuns
from hocket.runtime.offload.model_blocks import uniform
from hocket.runtime.planned_optimizer import planned_update
from hocket.runtime.replay import AS_ASKED, NOT_CUDA, NUM_WARM, REPLAYED
from hocket.runtime.trace_options import TraceOptions

NUM_CALLED = NUM_WARM + 1
"""The first step makes the optimizer's state; those after it are alike."""


class Graphs:
    """What stands for CUDA graphs: how many were made, and how often they were launched."""

    def __init__(self):
        self.num_made = self.num_launched = 0

    def __call__(self, run):
        self.num_made += 1

        def launch():
            self.num_launched += 1
            return run()

        return launch


def _loops(name, **policy):
    """The same loop twice: called, and replayed by graphs of its own."""
    model, batches, forward = MODELS[name]()
    loops, graphs = [], Graphs()
    for each in (model, copy.deepcopy(model)):
        section = uniform(each, 0, **policy)
        loops.append(loop_of(each, adamw(each), section, batches[0], forward))
    loops[1]._strategy._graph = BudgetGraph(loops[1].model, CPU, "", graphs)
    return loops, batches, graphs


def _assert_alike(loops):
    assert_same_state(loops[0].model, loops[1].model)


@pytest.mark.parametrize("name", ["picture", "again", "tied"])
def test_replayed_steps_train_as_called_ones_on_other_batches(name):
    loops, batches, graphs = _loops(name, activations="recomputed" if name == "picture" else "kept")
    for number in range(NUM_CALLED + 4):
        told = loops[1].replays
        assert told.startswith(REPLAYED) == (number >= NUM_CALLED), told
        losses = []
        for loop in loops:
            torch.manual_seed(number)
            losses.append(loop.step(batches[number % len(batches)]))
        assert torch.equal(*losses)
    assert (graphs.num_made, graphs.num_launched) == (1, 4)
    _assert_alike(loops)


def test_what_a_graph_has_as_numbers_begins_anew_when_it_changes():
    loops, batches, graphs = _loops("picture")
    [loop.step(batches[0]) for loop in loops for _ in range(NUM_CALLED + 1)]
    assert graphs.num_made == 1
    for loop in loops:
        loop.optimizer.param_groups[0]["lr"] /= 2
    [loop.step(batches[0]) for loop in loops for _ in range(NUM_WARM)]
    assert graphs.num_launched == 1
    [loop.step(batches[0]) for loop in loops]
    assert (graphs.num_made, graphs.num_launched) == (2, 2)
    _assert_alike(loops)


def test_a_graph_makes_room_for_an_evaluation_and_comes_back():
    loops, batches, graphs = _loops("picture")
    for _ in range(NUM_CALLED + MIN_REPLAYS):
        [loop.step(batches[0]) for loop in loops]
    assert torch.equal(*(loop.evaluate(batches[1]) for loop in loops))
    assert loops[1]._strategy._graph.replay.captured is None
    [loop.step(batches[2]) for loop in loops]
    assert graphs.num_made == 2
    [loop.predict(batches[1]) for loop in loops]  # after one step: it was not worth it
    [loop.step(batches[2]) for loop in loops]
    assert graphs.num_made == 2
    assert "between nearly all steps" in loops[1].replays
    _assert_alike(loops)


def test_gradients_that_wait_for_more_are_called():
    loops, batches, graphs = _loops("picture")
    for number in range(2 * NUM_WARM + 6):
        [loop.step(batches[number % 3], accumulate=number % 2 == 0) for loop in loops]
    assert graphs.num_launched == 0
    _assert_alike(loops)


def test_a_graph_makes_room_for_steps_that_are_called():
    """Both at once would hold more than was rehearsed; and a graph of a step that adds to gradients
    which are there would add to their memory each time."""
    loops, batches, graphs = _loops("picture")
    for _ in range(NUM_CALLED + MIN_REPLAYS):
        [loop.step(batches[0]) for loop in loops]
    assert loops[1]._strategy._graph.replay.captured is not None
    [loop.step(batches[0], accumulate=True) for loop in loops]
    assert loops[1]._strategy._graph.replay.captured is None
    for number in range(4):
        [loop.step(batches[number % 3]) for loop in loops]
        assert graphs.num_made == 1 + (number > 0)
    _assert_alike(loops)


def test_a_capture_that_fails_leaves_steps_as_they_are():
    loops, batches, _ = _loops("picture", activations="recomputed")

    def broken(run):
        raise RuntimeError("a kernel cannot be captured")

    loops[1]._strategy._graph = BudgetGraph(loops[1].model, CPU, "", broken)
    [loop.step(batches[0]) for loop in loops for _ in range(NUM_CALLED + 2)]
    assert loops[1].replays == "eager: RuntimeError: a kernel cannot be captured"
    _assert_alike(loops)


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1 * (n == 1))) for n in range(3))
        )

    def forward(self, rows):
        return self.layers(rows).square().mean()


def _traced(model, rows):
    update = planned_update(torch.optim.SGD(model.parameters(), lr=0.1), model)
    return TraceOptions(update=update, device="cpu").trace(model, rows, "train", is_run=False)


def test_plans_that_move_something_or_draw_again_are_not_replayed():
    model, rows = Dropped().train(), torch.randn(4, 8)
    graph, _ = _traced(model, rows)
    draws = [op for op in range(graph.num_ops) if graph.rng_order[op] >= 0]
    kept = MemoryBlock(name="layers.1", start=draws[0], stop=draws[0] + 1)
    dry_runs = _dry_runs(model, rows)

    def refusal(**policy):
        section = Memory(budget_bytes=(0,), blocks=(replace(kept, **policy),))
        return dry_runs.no_replay(section, 2**30)

    assert refusal() == ""
    assert "draws random numbers" in refusal(activations="recomputed")
    for policy in (
        {"activations": "offloaded"}, {"activations": "recomputed", "checkpoint": "offloaded"},
        {"parameters": "streamed"}, {"update": "host"},
    ):  # fmt: skip
        assert "moves bytes" in refusal(**policy)


def _dry_runs(model, batch, device="cuda", **options):
    """Dry runs of a model that is traced on a CPU batch, on whatever device."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = TraceOptions(update=planned_update(optimizer, model), device="cpu")
    task = task_of(model, optimizer, batch, recipe, torch.device(device), **options)
    return DryRuns(task, *_traced(model, torch.randn(4, 8)))


def test_a_batch_on_the_device_is_there_twice_where_steps_are_replayed():
    model, rows = Dropped().train(), torch.randn(4, 8)
    with FakeTensorMode():
        on_device = torch.empty(4, 2**10, device="cuda")
    ample = _dry_runs(model, (on_device, on_device))
    assert ample.no_replay(None, 2**30) == ""
    assert "a copy of the batch would take 16.0 KiB" in ample.no_replay(None, 2**19)
    assert _dry_runs(model, rows).no_replay(None, 2**19) == ""
    assert _dry_runs(model, rows, replay=False).no_replay(None, 2**30) == AS_ASKED


def test_steps_on_a_processor_are_eager():
    model, rows = Dropped().train(), torch.randn(4, 8)
    assert _dry_runs(model, rows, "cpu").no_replay(None, 2**30) == NOT_CUDA
    train = hocket.prepare(model, torch.optim.SGD(model.parameters()), rows, memory="1GiB")
    train.step(rows)
    assert train.replays == f"eager: {NOT_CUDA}"
