"""AdamW on the host in bfloat16: the bits of PyTorch's own kernel."""

import copy
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime.budget_loops import loop_of
from runtime.train_loops import assert_same_state, plain_steps
from torch import nn

import hocket
from hocket.base.errors import NoFeasiblePlanError
from hocket.runtime.offload import host_optimizer
from hocket.runtime.offload.host_adam import fused_adam_step, is_fused_adam, matches_torch
from hocket.runtime.offload.host_adam_kernel import adam_loop
from hocket.runtime.offload.model_blocks import uniform

exactly = pytest.mark.skipif(not matches_torch(), reason="this processor gives other bits")


@exactly
@settings(deadline=None, max_examples=40)
@given(
    num_vectors=st.integers(1, 200),
    seed=st.integers(0, 99),
    lr=st.floats(1e-6, 1.0),
    decay=st.floats(0, 0.5),
    betas=st.tuples(st.floats(0.51, 0.999), st.floats(0.5, 0.9999)),
    kind=st.sampled_from([torch.optim.Adam, torch.optim.AdamW]),
)
def test_steps_have_the_bits_of_the_fused_kernel(num_vectors, seed, lr, decay, betas, kind):
    size, draws = 16 * num_vectors, torch.Generator().manual_seed(seed)
    decay = decay if kind is torch.optim.AdamW else 0.0
    theirs = nn.Parameter(torch.randn(size, generator=draws))
    optimizer = kind([theirs], lr, betas=betas, weight_decay=decay, fused=True)
    assert is_fused_adam(optimizer)
    group, state, ours = optimizer.param_groups[0], {}, theirs.detach().clone()
    twin = torch.zeros(size, dtype=torch.bfloat16)
    for step in range(4):
        gradient = torch.randn(size, generator=draws).mul_(10.0 ** (step - 2)).bfloat16()
        theirs.grad = gradient.float()
        group["lr"] = lr / (1 + step)
        is_done = fused_adam_step(group, state, ours, gradient, twin)
        optimizer.step()
        # There is no state before the first step.
        assert is_done == (step > 0)
        if not is_done:
            state = {key: value.clone() for key, value in optimizer.state[theirs].items()}
            ours.copy_(theirs.detach())
            continue
        assert torch.equal(ours, theirs.detach())
        assert torch.equal(twin, theirs.detach().bfloat16())
        assert all(torch.equal(state[key], value) for key, value in optimizer.state[theirs].items())


def test_threads_with_fewer_cores_compile_after_it(monkeypatch):
    """As workers of parallel loops do, each on a core of its own."""

    def compiled():
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return numba.njit(lambda number: number + 1)(1)

    matches_torch()
    # Any setting of numba's that is another one makes it look at all of them again.
    monkeypatch.setenv("NUMBA_DEBUG_CACHE", "0")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(compiled).result() == 2


def test_other_updates_are_not_done_in_one_pass():
    parameters = [nn.Parameter(torch.zeros(3))]
    assert not is_fused_adam(torch.optim.SGD(parameters, 0.1, fused=True))
    assert not is_fused_adam(torch.optim.Adam(parameters, weight_decay=0.1, fused=True))
    assert not is_fused_adam(torch.optim.AdamW(parameters))
    assert not is_fused_adam(torch.optim.AdamW(parameters, fused=True, amsgrad=True))
    assert not is_fused_adam(torch.optim.AdamW(parameters, fused=True, maximize=True))
    assert not is_fused_adam(torch.optim.AdamW(parameters, fused=True, betas=(0.4, 0.9)))
    zeros = [torch.zeros(17) for _ in range(3)]
    state = {"step": torch.tensor(1.0), "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}
    group = torch.optim.AdamW(parameters, fused=True).param_groups[0]
    twin = torch.zeros(17, dtype=torch.bfloat16)
    # PyTorch rounds what is left over of its vectors in another way.
    assert not fused_adam_step(group, state, zeros[2], twin, twin.clone())
    assert state["step"] == 1


def forward(model, rows):
    with torch.autocast("cpu", torch.bfloat16):
        return model(rows).float().square().mean()


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_training_under_autocast_with_updates_at_home_is_plain_training(monkeypatch, kind, clip):
    """Whatever is done in one pass: gradients come home rounded, in parts, and stay exact."""
    monkeypatch.setattr(host_optimizer, "_MIN_FUSED_ELEMENTS", 64)
    monkeypatch.setattr(host_optimizer, "PIECE_BYTES", 1 << 12)
    done = _noted(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(3)))
    twin, batches = copy.deepcopy(model), [torch.randn(8, 40) for _ in range(6)]
    ours, plain = (
        getattr(torch.optim, kind)(m.parameters(), 1e-2, fused=True) for m in (model, twin)
    )
    section = uniform(model, 0, parameters="streamed", update="host")
    rounded = {name: torch.bfloat16 for name, _ in model.named_parameters()}
    train = loop_of(model, ours, section, batches[0], forward, rounded=rounded, clip_norm=clip)
    losses = [train.step(batch).item() for batch in batches]
    assert losses == plain_steps(twin, plain, batches, forward=forward, clip_norm=clip)
    train.state_dict()
    assert_same_state(model, twin)
    if matches_torch():
        assert any(done) == (kind == "AdamW" and clip is None)


def test_nothing_is_compiled_or_tried_once_a_training_begins(monkeypatch):
    monkeypatch.setattr(host_optimizer, "_MIN_FUSED_ELEMENTS", 64)
    done = _noted(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    batch, optimizer = torch.randn(4, 64), torch.optim.AdamW(model.parameters(), fused=True)
    prepare = partial(hocket.prepare, model, optimizer, batch, forward=forward, on="1xh200")
    with pytest.raises(NoFeasiblePlanError) as refused:
        prepare(memory=1)
    least = re.search(r'memory="([^"]+)"', refused.value.hint)
    matches_torch.cache_clear()
    train = prepare(memory=least.group(1))
    assert any(block.update == "host" for block in train.memory.section.blocks)
    tried, kinds = matches_torch.cache_info(), list(adam_loop.signatures)
    assert tried.misses == tried.currsize == len(kinds) == 1
    for _ in range(3):
        train.step(batch)
    train.state_dict()
    assert matches_torch.cache_info().misses == 1
    assert adam_loop.signatures == kinds
    assert any(done) == matches_torch()


def _noted(monkeypatch):
    """Whether each update from now on was done in one pass."""
    done = []

    def noted(*arguments):
        done.append(fused_adam_step(*arguments))
        return done[-1]

    monkeypatch.setattr(host_optimizer, "fused_adam_step", noted)
    return done
