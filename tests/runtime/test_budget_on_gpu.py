"""Training within a budget on CUDA streams is plain training on that device.

In float64, so that what is updated by the host, whose last bits are not the device's, stays near,
and anything that was read too early, twice or not at all does not.
"""

import copy
import re
from dataclasses import replace

import pytest
import torch
from runtime.budget_loops import loop_of, mixed
from runtime.budget_models import MODELS
from runtime.foreseen_models import FORESEEN
from runtime.train_loops import adamw, plain_steps
from torch.utils._pytree import tree_map

import hocket
from hocket.base.errors import NoFeasiblePlanError
from hocket.planners.memory.given_budget import budget_of
from hocket.runtime.offload.allocator import context_bytes

GPU = torch.device("cuda", 0)
NUM_STEPS = 8
CHANGED = ("changed rows", "changed ends")
"""What their modules were given is changed afterwards, so that they cannot be computed again."""
OTHERS = (
    "sums outside", "called twice", "unrolled", "parts outside", "skips", "saves more",
    "residual in place", "seen otherwise", "hf gpt2", "hf resnet",
)  # fmt: skip
BUILDS = {
    **{name: build for name, build in MODELS.items() if name != "rounded"},
    **{name: FORESEEN[name] for name in OTHERS + CHANGED},
}


def in_double(value):
    return value.double() if value.is_floating_point() else value


def built(name):
    """A model in float64, its batches, and how one becomes a loss."""
    model, batches, forward = BUILDS[name]()
    batches = batches if name in MODELS else [batches]
    return model.double(), tree_map(in_double, batches), forward


@pytest.mark.gpu
@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("accumulate", "clip_norm"), [(1, None), (2, 0.3)], ids=["", "clipped"])
def test_any_policies_train_as_plain_pytorch_does_there(name, seed, accumulate, clip_norm):
    torch.manual_seed(seed)
    model, batches, forward = built(name)
    batches = [batches[number % len(batches)] for number in range(NUM_STEPS)]
    twin = copy.deepcopy(model).to(GPU)
    optimizer, plain = adamw(model), adamw(twin)
    section = mixed(model, seed)
    if name in CHANGED:
        blocks = [replace(b, activations="offloaded", checkpoint="kept") for b in section.blocks]
        section = replace(section, blocks=tuple(blocks))
    train = loop_of(
        model, optimizer, section, batches[0], forward, device=GPU,
        accumulate=accumulate, clip_norm=clip_norm,
    )  # fmt: skip
    torch.manual_seed(seed)
    ours = [train.step(batch).item() for batch in batches]
    torch.manual_seed(seed)
    there = tree_map(lambda tensor: tensor.to(GPU), batches)
    theirs = plain_steps(
        twin, plain, there, forward=forward, clip_norm=clip_norm, accumulate=accumulate
    )
    # One model rounds its scores to float32.
    near = 1e-5 if name == "tied" else 1e-9
    assert ours == pytest.approx(theirs, rel=near)
    state = train.state_dict()["model"]
    for key, expected in twin.state_dict().items():
        assert torch.allclose(state[key].to(GPU), expected, rtol=near, atol=near), key


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["blocks", "picture", "recurrent"])
@pytest.mark.parametrize("seed", range(6))
def test_a_training_that_was_begun_there_goes_on_within_a_budget(name, seed):
    """Its parameters and the states of its optimizer are on the device."""
    torch.manual_seed(seed)
    model, batches, forward = built(name)
    model = model.to(GPU)
    there = tree_map(lambda tensor: tensor.to(GPU), batches)
    optimizer = adamw(model)
    plain_steps(model, optimizer, there, forward=forward)
    twin = copy.deepcopy(model)
    plain = adamw(twin)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train = loop_of(model, optimizer, mixed(model, seed), there[0], forward, device=GPU)
    torch.manual_seed(seed)
    ours = [train.step(batch).item() for batch in there]
    torch.manual_seed(seed)
    assert ours == pytest.approx(plain_steps(twin, plain, there, forward=forward), rel=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("part", [0.0, 0.5])
def test_a_card_that_has_the_budget_is_enough(part):
    """A hard cap at the smallest budget that a refusal names, or at more, is never reached.

    Context, its growth, library workspaces and the allocator's gaps are part of the budget.
    """
    width, rows = 1024, 8192
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(12))
    )
    batch = torch.randn(rows, width)

    def prepared(budget):
        return hocket.prepare(
            model, adamw(model), batch, forward=lambda model, x: model(x).square().mean(),
            memory=budget,
        )  # fmt: skip

    # The first refusal loads the kernels that dry runs measure, so the context has grown by then
    # and the second one names what is needed from here on.
    for _ in range(2):
        with pytest.raises(NoFeasiblePlanError) as refused:
            prepared(context_bytes(GPU) + 2**20)
    named = re.search(r'memory="([^"]+)"', refused.value.hint)
    plain_bytes = 14 * rows * width * 4 + 12 * width * width * 16
    budget = budget_of(named[1]) + int(part * plain_bytes)
    context = context_bytes(GPU)
    total = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((budget - context) / total)
    try:
        train = prepared(budget)
        assert train.memory.peak_bytes <= budget
        torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            train.step(batch)
        assert torch.cuda.max_memory_reserved() + context_bytes(GPU) <= budget
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
