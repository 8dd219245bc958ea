from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.capture import capture, load_model
from hocket.cost.host import EAGER, HostOverhead, issue_s, with_host_overhead
from hocket.cost.roofline import costs_from_settings, estimate_costs
from hocket.graph import Phase
from hocket.hardware import cluster_from_text

seconds = st.lists(st.floats(0, 10), min_size=1, max_size=12)


def queue_loop(kernel_s, host_s, num_steps):
    """The launch queue walked op by op: when each step ends on the device."""
    launched = ended = 0.0
    step_ends = []
    for _ in range(num_steps):
        for kernel, host in zip(kernel_s, host_s, strict=True):
            launched += host
            ended = max(ended, launched) + kernel
        step_ends.append(ended)
    return step_ends


@given(seconds, st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.integers(0, 2**20))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_overlapping_host_gives_the_steady_state_of_the_queue(kernels, forward, back, opt, seed):
    phase = np.sort(np.random.default_rng(seed).integers(0, 3, len(kernels))).astype(np.int8)
    host_s = np.array([forward, back, opt])[phase]
    op_s = with_host_overhead(np.array(kernels), host_s, overlaps=True)
    ends = queue_loop(kernels, host_s.tolist(), 40)
    assert np.all(op_s >= 0)
    np.testing.assert_allclose(op_s.sum(), max(sum(kernels), host_s.sum()), rtol=1e-9, atol=1e-9)
    if host_s.sum() > sum(kernels):
        np.testing.assert_allclose(op_s.sum(), ends[-1] - ends[-2], rtol=1e-9, atol=1e-9)
        assert np.all(op_s >= np.array(kernels) - 1e-9)


def test_overlapping_host_is_hidden_behind_a_busy_device():
    kernels = np.array([5.0, 0.0, 1.0])
    assert with_host_overhead(kernels, np.ones(3), overlaps=True).tolist() == [5.0, 0.0, 1.0]


def test_working_host_pays_dispatch_for_every_op_views_included():
    phase = np.array([Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER], np.int8)
    host = HostOverhead(forward_s=1.0, backward_s=2.0, optimizer_s=4.0)
    kinds = ("aten.mm", "aten.view", "optimizer.adamw")
    host_s = issue_s(host, kinds, np.arange(3), phase)
    assert with_host_overhead(np.array([10.0, 0.0, 1.0]), host_s, False).tolist() == [11, 2, 5]


def test_a_queue_is_fed_by_what_each_op_takes_the_host():
    kinds = ("aten.view", "aten.add", "aten.native_layer_norm", "aten.convolution",
             "aten.cudnn_batch_norm", "optimizer.adamw")  # fmt: skip
    op = np.arange(6)
    host = HostOverhead(forward_s=1.0, backward_s=2.0, optimizer_s=3.0, overlaps=True)
    forward = issue_s(host, kinds, op, np.zeros(6, np.int8))
    assert np.all(np.diff(forward[:5]) > 0)
    assert forward[0] < 1 < forward[1]
    assert np.all(issue_s(host, kinds, op, np.full(6, Phase.BACKWARD, np.int8))[:5] > forward[:5])
    assert issue_s(host, kinds, op[5:], np.full(1, Phase.OPTIMIZER, np.int8)) == 3.0
    assert issue_s(host, (), op[:0], np.zeros(0, np.int8)).shape == (0,)


GPT2 = {
    "aten.view": (236, 341), "aten.add": (172, 182), "aten.mm": (49, 98), "aten.sum": (0, 49),
    "aten.native_layer_norm": (25, 25), "aten.bernoulli_": (25, 0), "aten.clone": (4, 14),
    "aten._scaled_dot_product_efficient_attention": (12, 12), "aten.embedding": (3, 3),
    "aten._softmax": (1, 1),
}  # fmt: skip
"""Ops of its step by family, forward and backward."""


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_weights_of_ops_are_one_on_average_in_a_transformer(phase):
    """So that what is measured of a block of one is its mean, op by op."""
    counts = np.array([count[phase] for count in GPT2.values()])
    host = HostOverhead(forward_s=1.0, backward_s=1.0, overlaps=True)
    each = issue_s(host, tuple(GPT2), np.arange(len(GPT2)), np.full(len(GPT2), phase, np.int8))
    assert counts @ each / counts.sum() == pytest.approx(1.0, abs=0.1)


# ── predictions without a measured host ──────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def small_step():
    """A step so small that launching its ops takes longer than they do."""
    return capture(*load_model("mlp", batch=1))


def test_small_steps_take_what_the_host_takes(small_step):
    op_s = estimate_costs(small_step, cluster_from_text("h200")).op_s[0]
    host_s = issue_s(EAGER, small_step.kinds, small_step.op_kind, small_step.op_phase)
    assert op_s.sum() == pytest.approx(host_s.sum(), rel=0.01)
    counts = np.bincount(small_step.op_phase, minlength=3)
    mean_s = counts @ [EAGER.forward_s, EAGER.backward_s, EAGER.optimizer_s]
    assert op_s.sum() == pytest.approx(mean_s, rel=0.1)


def test_replayed_graphs_wait_for_no_host(small_step):
    cluster = cluster_from_text("h200")
    eager = estimate_costs(small_step, cluster)
    replayed = estimate_costs(small_step, cluster, launches="replayed")
    assert replayed.op_s.sum() < 0.3 * eager.op_s.sum()
    again = costs_from_settings(small_step, cluster, replayed.settings)
    assert np.array_equal(again.op_s, replayed.op_s)


def test_processors_and_graphs_of_no_framework_have_no_host(small_step):
    bare = replace(small_step, signatures=(), op_signature=np.full(small_step.num_ops, -1, "i4"))
    assert estimate_costs(bare, cluster_from_text("h200")).op_s.sum() < (
        0.7 * estimate_costs(small_step, cluster_from_text("h200")).op_s.sum()
    )
    on_processor = (estimate_costs(g, cluster_from_text("cpu-host")) for g in (bare, small_step))
    first, second = (costs.op_s.sum() for costs in on_processor)
    assert first == pytest.approx(second)
