import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.cost.host import HostOverhead, with_host_overhead
from hocket.graph import Phase

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
    host = HostOverhead(forward_s=forward, backward_s=back, optimizer_s=opt, overlaps=True)
    op_s = with_host_overhead(np.array(kernels), phase, host)
    host_s = np.array([forward, back, opt])[phase]
    ends = queue_loop(kernels, host_s.tolist(), 40)
    assert np.all(op_s >= 0)
    np.testing.assert_allclose(op_s.sum(), max(sum(kernels), host_s.sum()), rtol=1e-9, atol=1e-9)
    if host_s.sum() > sum(kernels):
        np.testing.assert_allclose(op_s.sum(), ends[-1] - ends[-2], rtol=1e-9, atol=1e-9)
        assert np.all(op_s >= np.array(kernels) - 1e-9)


def test_overlapping_host_is_hidden_behind_a_busy_device():
    kernels = np.array([5.0, 0.0, 1.0])
    host = HostOverhead(forward_s=1.0, overlaps=True)
    assert with_host_overhead(kernels, np.zeros(3, np.int8), host).tolist() == [5.0, 0.0, 1.0]


def test_working_host_pays_dispatch_for_every_op_views_included():
    phase = np.array([Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER], np.int8)
    host = HostOverhead(forward_s=1.0, backward_s=2.0, optimizer_s=4.0)
    assert with_host_overhead(np.array([10.0, 0.0, 1.0]), phase, host).tolist() == [11, 2, 5]
