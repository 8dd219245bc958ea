"""CSV files against torch's own parser, checks, transfers and schedules; no processes."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planners.torch_csv_reader import from_torch_csv
from simulate.pipelines import CASES, even_costs, schedules, stage_costs

from hocket.planners.parallel.schedules import (
    make_schedule,
    to_torch_csv,
)
from hocket.simulate.pipeline import simulate_pipeline

IDS = [f"{name}-{chunks}" for name, chunks in CASES]


@settings(derandomize=True, deadline=None, max_examples=50)
@given(schedules())
def test_csv_is_read_back_unchanged(schedule):
    again = from_torch_csv(to_torch_csv(schedule), name=schedule.name)
    assert again.num_microbatches == schedule.num_microbatches
    for field in ("device_of_stage", "start", "work", "stage", "microbatch"):
        assert getattr(again, field).tolist() == getattr(schedule, field).tolist()


def test_csv_cells_are_those_of_torch():
    assert to_torch_csv(make_schedule("1f1b", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(("name", "chunks"), CASES, ids=IDS)
def test_torch_lowers_and_simulates_our_csv(name, chunks, tmp_path):
    _assert_torch_can_run(make_schedule(name, 4, 8, chunks), tmp_path / "schedule.csv")


def _assert_torch_can_run(schedule, path):
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    path.write_text(to_torch_csv(schedule))
    chunks = schedule.num_stages // schedule.num_devices
    runtime = _torch_runtime(
        torch_schedules, schedule.num_devices, schedule.num_microbatches, chunks
    )
    runtime._load_csv(str(path), format="compute_only")
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.device_of_stage.tolist()))
    for rank_actions in runtime.pipeline_order_with_comms.values():
        # The simulator of torch 2.13 knows computations and transfers only.
        extra = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
        rank_actions[:] = [a for a in rank_actions if a.computation_type.value not in extra]
    runtime._simulate()


def _torch_runtime(torch_schedules, num_devices, num_microbatches, chunks):
    """Torch's runtime as it is before it meets its processes."""
    runtime = object.__new__(torch_schedules._PipelineScheduleRuntime)
    runtime.pp_group_size = num_devices
    runtime._num_stages = num_devices * chunks
    runtime._n_microbatches = num_microbatches
    runtime._stages = [SimpleNamespace() for _ in range(chunks)]
    runtime._defer_pp_recv = False
    runtime.pipeline_order = {}
    return runtime


OURS = {
    "GPipe": ("gpipe", 1),
    "1F1B": ("1f1b", 1),
    "LoopedBFS": ("looped-bfs", 2),
    "Interleaved1F1B": ("interleaved", 2),
    "InterleavedZeroBubble": ("zb-h1", 2),
    "ZBVZeroBubble": ("zb-v", 2),
    "DualPipeV": ("dualpipe-v", 2),
}


@pytest.mark.parametrize("name", OURS)
def test_schedules_of_torch_take_as_long_as_ours(name):
    pytest.importorskip("torch")
    ours, chunks = OURS[name]
    for num_devices, num_microbatches in ((2, 4), (4, 8), (4, 16), (3, 8)):
        rows = _torch_rows(name, num_devices, num_microbatches, chunks)
        theirs = from_torch_csv("".join(",".join(row) + "\n" for row in rows))
        schedule = make_schedule(ours, num_devices, num_microbatches, chunks)
        assert theirs.device_of_stage.tolist() == schedule.device_of_stage.tolist()
        for times in ((1.0, 1.0, 1.0), (1.0, 1.5, 0.75)):
            costs = even_costs(num_devices, chunks, times)
            expected, found = (simulate_pipeline(each, costs) for each in (theirs, schedule))
            assert found.makespan_s == pytest.approx(expected.makespan_s)
            assert found.peak_bytes.tolist() == expected.peak_bytes.tolist()


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.data())
def test_in_order_schedules_of_torch_take_as_long_on_uneven_stages(data):
    pytest.importorskip("torch")
    name = data.draw(st.sampled_from(["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"]))
    ours, chunks = OURS[name]
    rows = _torch_rows(name, 3, 9, chunks)
    theirs = from_torch_csv("".join(",".join(row) + "\n" for row in rows))
    costs = data.draw(stage_costs(3, chunks))
    expected, found = (
        simulate_pipeline(each, costs) for each in (theirs, make_schedule(ours, 3, 9, chunks))
    )
    assert found.makespan_s == pytest.approx(expected.makespan_s)
    assert found.peak_bytes.tolist() == expected.peak_bytes.tolist()


def _torch_rows(name, num_devices, num_microbatches, chunks):
    """The cells of a schedule that torch makes, with pairs and waits as it writes them."""
    from torch.distributed.pipelining import _schedule_visualizer, schedules

    order = _schedule_visualizer.get_schedule_ops(
        schedules.get_schedule_class(name), num_devices, num_microbatches, chunks
    )
    rows = [
        [str(action) for action in row if action is not None and "REDUCE" not in str(action)]
        for row in order
    ]
    if name == "1F1B":
        # Torch 2.13 draws the forwards of the last rank one too high; it runs them right.
        last = num_devices - 1
        rows[last] = [
            f"{last}F{int(cell.split('F')[1]) - 1}" if "F" in cell else cell for cell in rows[last]
        ]
    return rows
