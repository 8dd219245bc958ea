import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import InputFileError
from hocket.cost.parallel.softwares import find_software
from hocket.hardware import cluster_from_text
from hocket.plan.files import plan_from_data, plan_to_data, read_plan, write_plan
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel, Schedule
from hocket.plan.sections.schedule import StageWork
from hocket.plan.training import TransformerTraining
from hocket.plan.transformer_plan import TransformerPlan, rank_memory_violations
from hocket.plan.verify import structure_violations
from hocket.transformer import Experts, ParallelConfig, Transformer

MODEL = Transformer(
    name="small", hidden=64, layers=6, heads=4, kv_heads=2, head_width=16, mlp_width=128,
    mlp="swiglu", vocabulary=1000, sequence=32, tied_embeddings=False, learned_positions=False,
    biases=False, dropout=False,
)  # fmt: skip


def _schedule(num_devices, num_microbatches, *, split=False):
    """All forwards, then all backwards: legal on one stage per device."""
    rows = []
    for device in range(num_devices):
        rows += [(StageWork.FORWARD, device, m) for m in range(num_microbatches)]
        for m in range(num_microbatches):
            if split:
                rows += [
                    (StageWork.INPUT_GRADIENT, device, m),
                    (StageWork.WEIGHT_GRADIENT, device, m),
                ]
            else:
                rows.append((StageWork.BACKWARD, device, m))
    per_device = len(rows) // num_devices
    work, stage, microbatch = np.array(rows, dtype=np.int32).T
    return Schedule(
        name="gpipe",
        num_microbatches=num_microbatches,
        device_of_stage=np.arange(num_devices, dtype=np.int32),
        start=np.arange(num_devices + 1, dtype=np.int32) * per_device,
        work=work,
        stage=stage,
        microbatch=microbatch,
    )


def _plan(pipeline=2, data=2, num_microbatches=3, *, split=False, experts=None, layers=None):
    config = ParallelConfig(
        tensor=2, pipeline=pipeline, data=data, microbatch=1,
        global_batch=num_microbatches * data, schedule="gpipe", recompute="selective",
        zero=int(data > 1), sequence_parallel=True, layers=layers,
    )  # fmt: skip
    cluster = cluster_from_text("8xa100-80g")
    names, each = cluster.device_names, 2 * data
    devices = tuple(names[i * each : (i + 1) * each] for i in range(pipeline))
    placed = Parallel.of_config(config, MODEL, devices)
    plan = Plan(
        planner="divide",
        sections=(placed, _schedule(pipeline, num_microbatches, split=split)),
        notes={"why": "because"},
    )
    work = TransformerTraining(
        model=replace(MODEL, experts=experts),
        global_batch=config.global_batch,
        software=find_software("megatron-core"),
    )
    claimed = plan.claiming(step_s=1.5, peak_bytes=(10**6 + 3000,) * pipeline)
    return TransformerPlan(Problem(work=work, cluster=cluster), claimed)


def _data(divided):
    return json.loads(json.dumps(plan_to_data(divided.problem, divided.plan)))


def _read(data):
    saved = plan_from_data(data, "plan.json")
    return TransformerPlan(saved.problem, saved.plan)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    shape=st.sampled_from([(1, 4), (2, 2), (3, 1), (1, 1)]),
    num_microbatches=st.integers(1, 5),
    split=st.booleans(),
    experts=st.sampled_from([None, Experts(count=4, active=2, mlp_width=32)]),
)
def test_plan_read_back_is_the_plan(shape, num_microbatches, split, experts):
    plan = _plan(*shape, num_microbatches, split=split, experts=experts)
    again = _read(_data(plan))
    assert again.model == plan.model
    assert again.config == plan.config
    assert again.cluster.content_hash == plan.cluster.content_hash
    assert again.devices == plan.devices
    assert vars(again.costs) == vars(plan.costs)
    for name in ("device_of_stage", "start", "work", "stage", "microbatch"):
        assert np.array_equal(getattr(again.schedule, name), getattr(plan.schedule, name))
    assert _data(again) == _data(plan)


def test_equal_plans_give_equal_bytes_and_the_file_is_compact(tmp_path):
    for name in ("a.json", "b.json"):
        made = _plan()
        write_plan(tmp_path / name, made.problem, made.plan)
    written = (tmp_path / "a.json").read_bytes()
    assert written == (tmp_path / "b.json").read_bytes()
    assert b'"F0.0 F0.1 F0.2 B0.0 B0.1 B0.2"' in written
    assert read_plan(tmp_path / "a.json").plan.claims.step_s == 1.5


def test_uneven_layers_are_kept():
    plan = _plan(layers=(2, 4))
    assert _read(_data(plan)).config.layers == (2, 4)


def _set(*path_and_value):
    *path, key, value = path_and_value

    def edit(data):
        for part in path:
            data = data[part]
        data[key] = value

    return edit


PARALLEL, SCHEDULE = ("sections", "parallel"), ("sections", "schedule")
REPLICA = (*PARALLEL, "replicas", 0)
BROKEN = {
    "another schema": (_set("schema", "hocket.plan/7"), "not a hocket.plan/3 file"),
    "unknown key": (_set(*PARALLEL, "tensors", 8), "unknown key 'tensors' in parallel"),
    "text for a number": (_set(*PARALLEL, "tensor", "8"), "parallel.tensor"),
    "huge degree": (_set(*PARALLEL, "context", 10**18), "parallel.context"),
    "negative microbatch": (_set(*REPLICA, "microbatches", 0, -1), "replicas[0].microbatches"),
    "ops cut": (_set(*PARALLEL, "layers", None), "how many layers each stage has"),
    "another cluster": (_set("problem", "cluster", "hash", "0" * 64), "another cluster"),
    "device twice": (_set(*REPLICA, "devices", 0, "gpu5"), "device 'gpu5' is in two stages"),
    "no such device": (_set(*REPLICA, "devices", 0, "gpu77"), "no device 'gpu77'"),
    "too few devices": (_set(*REPLICA, "devices", ["gpu0"]), "each stage has 2 devices"),
    "fewer stages": (_set(*REPLICA, "devices", ["gpu0", "gpu1"]), "other stages or microbatches"),
    "layers missing": (_set(*PARALLEL, "layers", [3, 2]), "5 layers instead of 6"),
    "batch": (_set(*REPLICA, "microbatches", [1, 1, 2]), "7 of the batch's 6 samples"),
    "heads": (_set("problem", "work", "training", "content", "model", "heads", 3), "heads"),
    "stage of nobody": (_set(*SCHEDULE, "device_of_stage", [0, 9]), "rank that does not exist"),
    "word": (_set(*SCHEDULE, "actions", 0, "F0.0 X1.1"), "'X1.1'"),
    "action of another": (
        _set(*SCHEDULE, "actions", 0, "F1.0 F0.1 F0.2 B0.0 B0.1 B0.2"),
        "stage 1 is on device 0, not on 1",
    ),
    "action twice": (
        _set(*SCHEDULE, "actions", 0, "F0.0 F0.0 F0.2 B0.0 B0.1 B0.2"),
        "stage 0 has the forward of microbatch 0 2 times",
    ),
    "half a backward": (
        _set(*SCHEDULE, "actions", 0, "F0.0 F0.1 F0.2 B0.0 B0.1 I0.2"),
        "stage 0 has the weight gradient of microbatch 2 0 times",
    ),
    "microbatch beyond": (
        _set(*SCHEDULE, "actions", 0, "F0.0 F0.1 F0.999999999 B0.0 B0.1 B0.2"), "does not exist",
    ),
    "microbatch just beyond": (
        _set(*SCHEDULE, "actions", 0, "F0.0 F0.1 F0.3 B0.0 B0.1 B0.2"), "does not exist",
    ),
    "stage just beyond": (
        _set(*SCHEDULE, "actions", 0, "F0.0 F0.1 F2.2 B0.0 B0.1 B0.2"), "does not exist",
    ),
    "peaks of too few": (_set("claims", "peak_bytes", [1]), "peak_bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_refused_with_its_place(name):
    edit, said = BROKEN[name]
    data = _data(_plan())
    edit(data)
    with pytest.raises(InputFileError) as caught:
        _read(data)
    assert said in str(caught.value)
    assert caught.value.where.startswith("plan.json")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"nonsense",
        b'{"schema": "hocket.parallel/1"}',
        b'{"schema": "hocket.plan/3"}',
        b"\x00" * 50,
    ],
)
def test_what_is_no_plan_is_refused(content, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(InputFileError):
        read_plan(path)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_a_file_with_one_value_replaced_never_ends_in_another_error(draw):
    data = _data(_plan())
    place, key = data, draw.draw(st.sampled_from(sorted(data)))
    while isinstance(place[key], (dict, list)) and place[key] and draw.draw(st.booleans()):
        place = place[key]
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = draw.draw(st.sampled_from(list(keys)))
    place[key] = draw.draw(st.sampled_from([None, -1, 2**70, "", "x", [], {}, True, 0.5, [[]]]))
    try:
        plan = _read(data)
    except InputFileError:
        return
    # What is accepted is a plan that can be written and read again.
    again = _read(_data(plan))
    assert _data(again) == _data(plan)


def test_did_you_mean_for_a_wrong_key():
    data = _data(_plan())
    degrees = data["sections"]["parallel"]
    degrees["tensr"] = degrees.pop("tensor")
    with pytest.raises(InputFileError) as caught:
        _read(data)
    assert caught.value.hint == "did you mean 'tensor'?"


def test_memory_that_does_not_fit_is_named():
    plan = _plan()
    assert list(rank_memory_violations(plan, plan.plan.claims.peak_bytes)) == []
    (found,) = rank_memory_violations(plan, (10**6, 100 * 2**30))
    assert found.rule == "memory"
    assert "rank 1 lacks 20.0 GiB" in found.message
    assert list(structure_violations(plan.plan, plan.problem)) == []


@pytest.mark.parametrize(
    ("what", "size"), [("heads", 5), ("hidden", 63), ("mlp_width", 127)], ids=lambda each: each
)
def test_sizes_that_the_tensor_degree_does_not_divide_are_named(what, size):
    divided = _plan()
    work = replace(divided.problem.work, model=replace(MODEL, **{what: size}))
    found = list(structure_violations(divided.plan, replace(divided.problem, work=work)))
    assert any(f"{size} is not divisible by tensor 2" in each.message for each in found)


def test_a_schedule_without_weight_gradients_is_refused():
    divided = _plan(split=True)
    schedule = divided.plan[Schedule]
    kept = np.flatnonzero(schedule.work != StageWork.WEIGHT_GRADIENT)
    columns = {name: getattr(schedule, name)[kept] for name in ("work", "stage", "microbatch")}
    start = np.searchsorted(kept, schedule.start).astype(np.int32)
    plan = divided.plan.having(replace(schedule, start=start, **columns))
    (found,) = structure_violations(plan, divided.problem)
    assert "stage 0 has the weight gradient of microbatch 0 0 times" in found.message
