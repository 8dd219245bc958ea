"""Piper's division of models: the optimum of its recurrence, never worse than greedy choices."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from contrib.piper_oracle import check_plan, every_division, full_table, greedy_time
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hocket.base.errors import InputFileError, NoFeasiblePlanError, UsageError
from hocket.contrib.piper import piper_plan, read_piper
from hocket.contrib.piper.input import piper_input

INPUTS = Path(__file__).parents[3] / "shared" / "data" / "parallelism" / "piper" / "inputs"
needs_inputs = pytest.mark.skipif(not INPUTS.exists(), reason="no ../shared/data at hand")


@st.composite
def models(draw, max_nodes=5, is_uniform=False):
    """Small models: a chain with some edges more, some free nodes, one to three variants."""
    num_nodes = draw(st.integers(1, max_nodes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    edges = {}
    for dst in range(1, num_nodes):
        for src in range(dst):
            if rng.random() < (0.85 if src == dst - 1 else 0.25):
                edges[src, dst] = float(rng.integers(0, 5))
    degrees = [d for d in (1, 2, 4) if rng.random() < 0.6] or [1]
    nodes = [_node(rng, number, edges, degrees, is_uniform) for number in range(num_nodes)]
    return piper_input(
        {
            "maxDevices": 8,
            "maxMemoryPerDevice": float(rng.integers(8, 80)),
            "bandwidth": 2.0,
            "mbsInBatch": draw(st.sampled_from([1, 4, 6, 12])),
            "nodes": nodes,
            "edges": [
                {"sourceId": src, "destId": dst, "communicationCost": cost}
                for (src, dst), cost in edges.items()
            ],
        }
    )


def _node(rng, number, edges, degrees, is_uniform):
    before = [src for src, dst in edges if dst == number]
    after = [dst for src, dst in edges if src == number]
    is_free = rng.random() < 0.15
    for ends in [ends for ends in edges if number in ends and is_free]:
        edges[ends] = 0.0
    scale = 0 if is_free else 1
    variants = {}
    for degree in degrees:
        if not is_free and len(degrees) > 1 and rng.random() < 0.15:
            continue
        variants[str(degree)] = [
            {
                "id": f"way{way}",
                "timePerSample": scale * float(rng.integers(1, 20)),
                "parameterSize": scale * float(rng.integers(0, 9)),
                "memoryUsageA": scale * float(rng.integers(0, 9)),
                "memoryUsageB": scale * float(rng.integers(0, 9)),
                "syncTimeFw": {str(src): scale * float(rng.integers(0, 3)) for src in before},
                "syncTimeBw": {str(dst): scale * float(rng.integers(0, 3)) for dst in after},
            }
            for way in range(2 if is_uniform else rng.integers(1, 4))
        ]
    if not variants:
        return _node(rng, number, edges, degrees, is_uniform)
    return {"id": number, "name": f"layer {number}", "TMPCs": variants}


def _time(model, num_devices):
    try:
        plan = piper_plan(model, num_devices)
    except NoFeasiblePlanError:
        return np.inf
    assert check_plan(model, plan, num_devices) == pytest.approx(plan.time_s, rel=1e-9)
    return plan.time_s


@given(models(), st.integers(1, 8))
@settings(derandomize=True, deadline=None, max_examples=30)
def test_plan_equals_the_full_table(model, num_devices):
    assert _time(model, num_devices) == pytest.approx(full_table(model, num_devices), rel=1e-9)


@given(models(max_nodes=3), st.integers(1, 4))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_plan_equals_every_division(model, num_devices):
    assert _time(model, num_devices) == pytest.approx(every_division(model, num_devices), rel=1e-9)


@given(models(is_uniform=True), st.integers(1, 8))
@settings(derandomize=True, deadline=None, max_examples=30)
def test_plan_is_never_worse_than_with_greedy_choices(model, num_devices):
    greedy = full_table(model, num_devices, greedy_time)
    assume(np.isfinite(greedy))
    assert _time(model, num_devices) <= greedy * (1 + 1e-9)


# ── published inputs ─────────────────────────────────────────────────────────────────────────────


@needs_inputs
@pytest.mark.parametrize("memory_gib", [80, 8])
def test_bert_equals_the_full_table(memory_gib):
    model = read_piper(INPUTS / "bert32a100.json")
    model = replace(model, memory_bytes=memory_gib * 2.0**30, num_microbatches=16)
    greedy = full_table(model, 6, greedy_time)
    assert _time(model, 6) == pytest.approx(greedy, rel=1e-9)


@needs_inputs
@pytest.mark.parametrize("name", ["bert32a100", "gnmt", "resnet"])
def test_published_inputs_plan_within_memory(name):
    model = replace(read_piper(INPUTS / f"{name}.json"), memory_bytes=8.0 * 2**30)
    times = [_time(model, count) for count in (8, 16)]
    assert times[1] < times[0] < np.inf


@needs_inputs
def test_bert_on_2048_devices_is_near_the_work_that_there_is():
    model = read_piper(INPUTS / "bert32a100.json")
    plan = piper_plan(model, 2048)
    assert check_plan(model, plan, 2048) == pytest.approx(plan.time_s, rel=1e-9)
    work_s = sum(
        min(degree * v.time_s for degree, some in node.variants.items() for v in some)
        for node in model.nodes
    )
    assert work_s / 2048 <= plan.time_s <= 1.5 * work_s / 2048


# ── what is refused ──────────────────────────────────────────────────────────────────────────────


def _small():
    def node(number, before, after):
        variant = {
            "id": "vanilla", "timePerSample": 1.0, "parameterSize": 1.0, "memoryUsageA": 3.0,
            "memoryUsageB": 2.0, "syncTimeFw": dict.fromkeys(before, 0.0),
            "syncTimeBw": dict.fromkeys(after, 0.0),
        }  # fmt: skip
        return {"id": number, "TMPCs": {"1": [variant]}}

    return {
        "maxDevices": 2,
        "maxMemoryPerDevice": 100.0,
        "bandwidth": 1.0,
        "mbsInBatch": 2,
        "nodes": [node(0, [], ["1"]), node(1, ["0"], [])],
        "edges": [{"sourceId": 0, "destId": 1, "communicationCost": 0.0}],
    }


def _changed(path, value):
    data = _small()
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return data


VARIANT = ("nodes", 1, "TMPCs", "1", 0)
EDGE = {"sourceId": 0, "destId": 1, "communicationCost": 0.0}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("maxDevices",), 0, "maxDevices is 0"),
        (("maxMemoryPerDevice",), -1, "maxMemoryPerDevice"),
        (("bandwidth",), 0, "bandwidth"),
        (("mbsInBatch",), 1.5, "mbsInBatch"),
        (("nodes",), [], "0 nodes"),
        (("nodes",), {}, "nodes is"),
        (("extra",), 1, "unknown key 'extra'"),
        (("nodes", 1, "id"), 0, "same id"),
        (("nodes", 1, "TMPCs"), {}, "no way to be run"),
        (("nodes", 1, "TMPCs"), {"x": []}, "whole number|key 'x'"),
        ((*VARIANT, "timePerSample"), -1, r"nodes\[1\]\.TMPCs\.1\[0\]\.timePerSample"),
        ((*VARIANT, "memoryUsageA"), "much", "memoryUsageA"),
        ((*VARIANT, "syncTimeFw"), {}, "syncTimeFw of node 1"),
        ((*VARIANT, "syncTimeBw"), {"0": 1.0}, "syncTimeBw of node 1"),
        (("edges",), [EDGE, EDGE], "repeats"),
        (("edges",), [{**EDGE, "destId": 7}], "no node at one end"),
        (("edges",), [EDGE, {**EDGE, "sourceId": 1, "destId": 0}], "cycle"),
    ],
)
def test_bad_files_are_refused(tmp_path, path, value, message):
    file = tmp_path / "model.json"
    file.write_text(json.dumps(_changed(path, value)))
    with pytest.raises(InputFileError, match=message) as caught:
        read_piper(file)
    assert str(file) in str(caught.value)


def test_good_file_of_two_layers_is_divided():
    plan = piper_plan(piper_input(_small()))
    assert plan.time_s == pytest.approx(1.0)
    assert plan.num_devices == 2


@pytest.mark.parametrize(("memory", "message"), [(4, "node 0"), (9, "no division over 1 device")])
def test_too_little_memory_names_what_is_lacking(memory, message):
    model = replace(piper_input(_small()), memory_bytes=memory)
    with pytest.raises(NoFeasiblePlanError, match=message):
        piper_plan(model, 1)


def test_tensor_degree_above_the_devices_is_named():
    data = _small()
    data["nodes"][1]["TMPCs"] = {"4": data["nodes"][1]["TMPCs"]["1"]}
    with pytest.raises(NoFeasiblePlanError, match="node 1 '' needs a tensor degree above 2"):
        piper_plan(piper_input(data))


@pytest.mark.parametrize("num_devices", [0, 10**7])
def test_wrong_numbers_of_devices_are_refused(num_devices):
    with pytest.raises(UsageError, match="devices"):
        piper_plan(piper_input(_small()), num_devices)
