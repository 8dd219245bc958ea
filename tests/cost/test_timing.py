"""Clocks: what a call takes on the host and on a GPU, and what the host takes beside its ops."""

import time

import pytest

torch = pytest.importorskip("torch")

from hocket.cost import dispatch, timing  # noqa: E402
from hocket.cost.dispatch import measure_host_overhead  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def busy(seconds):
    """Work for a known time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_call_time_of_known_work():
    seconds = timing.call_s([lambda: busy(2e-3)], torch.device("cpu"))
    assert 2e-3 <= seconds < 3e-3


def test_host_clock_counts_waiting_only_with_several_threads():
    for threads, low, high in ((1, 0.0, 5e-3), (2, 10e-3, 1.0)):
        torch.set_num_threads(threads)
        clock = timing.host_clock()
        start = clock()
        time.sleep(10e-3)
        assert low <= clock() - start < high


def test_call_time_takes_turns_and_stops_at_the_limit():
    turns = []
    calls = [lambda: turns.append(0), lambda: turns.append(1)]
    timing.call_s(calls, torch.device("cpu"))
    assert abs(turns.count(0) - turns.count(1)) <= timing.NUM_SAMPLES + 2
    slow = []
    timing.call_s([lambda: (slow.append(0), busy(0.02))], torch.device("cpu"), limit_s=0.05)
    assert len(slow) == 2


@pytest.mark.parametrize(("is_awake", "num_tries"), [([], 1), ([True, False], 2), ([True] * 9, 3)])
def test_cuda_timing_keeps_the_device_asleep_while_calls_are_enqueued(
    monkeypatch, is_awake, num_tries
):
    """The stream as a list: what is enqueued, in which order. A device that woke up before all was
    asked for sleeps longer, until it would never be asleep."""
    stream, cycles, awake = [], [], list(is_awake)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            stream.append("event")

        def query(self):
            return awake.pop(0) if awake else False

        def synchronize(self):
            stream.append("wait")

        def elapsed_time(self, end):
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: stream.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda n: (stream.append("sleep"), cycles.append(n)))
    seconds = timing._cuda_sample_s([lambda: stream.append("call")], 3)
    one = ["wait", "sleep", "event", "call", "call", "call", "event", "wait"]
    assert stream == one * num_tries
    assert cycles == [cycles[0] * 4**n for n in range(num_tries)]
    assert seconds == pytest.approx(1e-3)


def test_host_overhead_is_what_phases_take_beyond_the_work_of_their_ops(monkeypatch):
    # Forward, both passes, the optimizer, its one kernel, then the ops of each pass by themselves.
    seconds = iter([3e-3, 9e-3, 4e-3, 1e-3, 1e-3, 2e-3])
    num_ops = []
    record = dispatch._recorded

    def recorded(phase):
        ops = record(phase)
        num_ops.append(ops.num_ops)
        return ops

    def took_s(call, device):
        call()
        return next(seconds)

    monkeypatch.setattr(dispatch, "_recorded", recorded)
    monkeypatch.setattr(dispatch, "wall_s", took_s)
    host = measure_host_overhead(torch.device("cpu"))
    assert not host.overlaps
    forward, backward = num_ops
    assert min(forward, backward) > 10
    assert host.forward_s == pytest.approx((3e-3 - 1e-3) / forward)
    assert host.backward_s == pytest.approx((9e-3 - 3e-3 - 2e-3) / backward)
    num_parameters = (4e-3 - 1e-3) / host.optimizer_s
    assert num_parameters == pytest.approx(round(num_parameters))


@pytest.mark.parametrize(("device", "expected_s"), [("cuda", 0.002), ("cpu", 3.0)])
def test_a_first_call_that_loads_kernels_is_no_measurement_on_a_gpu(
    device, expected_s, monkeypatch
):
    seconds = iter([3.0, 0.002, 0.002, 0.002, 0.002, 0.002, 0.002])
    for name in ("_cuda_sample_s", "_cpu_sample_s"):
        monkeypatch.setattr(timing, name, lambda calls, num_calls: next(seconds))
    assert timing.call_s([lambda: None], torch.device(device), limit_s=1.0) == expected_s
