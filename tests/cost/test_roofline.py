from dataclasses import replace

import numpy as np
import pytest
from cost.cost_samples import CPU, TESLA, cluster_of, entry_of, graph_of, profile_of, step_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import InputFileError, UsageError
from hocket.cost.calibrate import Calibration
from hocket.cost.costs import TimeSource
from hocket.cost.demand import ON_DEVICE, ON_HOST, demand_of
from hocket.cost.efficiency import (
    DEFAULT_EFFICIENCY,
    Efficiency,
    KindFit,
    default_efficiency,
    peak_flops,
)
from hocket.cost.host import HostOverhead
from hocket.cost.roofline import costs_from_settings, estimate_costs
from hocket.graph import DTYPES, StatedTimes

KINDS = ("aten.mm", "aten.add", "aten.convolution", "aten.embedding", "aten.sum", "what")


def test_roofline_equals_its_closed_form_on_each_side():
    op_s = estimate_costs(step_graph(), cluster_of(TESLA)).op_s[0]
    matmul, add = (default_efficiency(f, "float32", TESLA) for f in ("matmul", "elementwise"))
    assert op_s[0] == pytest.approx(1e12 / (10e12 * matmul.compute))
    assert op_s[1] == pytest.approx(1e9 / (1e12 * add.memory))
    assert op_s[2] == TESLA.launch_s
    assert op_s[3] == 0.0
    assert op_s[4] == op_s[0]


def test_roofline_takes_the_slower_of_arithmetic_and_memory():
    memory_bound = {"kind": "aten.mm", "flops": 1e9, "bytes_touched": 10**9}
    op_s = estimate_costs(graph_of([memory_bound]), cluster_of(TESLA)).op_s[0]
    assert op_s[0] == pytest.approx(1e9 / (1e12 * DEFAULT_EFFICIENCY["matmul"].memory))


@pytest.mark.parametrize(
    ("family", "dtype", "peak"),
    [
        ("matmul", "float32", 10e12),
        ("matmul", "float16", 100e12),
        ("matmul", "bfloat16", 10e12),
        ("matmul", "float64", 10e12),
        ("matmul", "float8", 100e12),
        ("matmul", "other", 10e12),
        ("convolution", "float32", 40e12),
        ("convolution", "float16", 100e12),
        ("elementwise", "float16", 10e12),
    ],
)
def test_peak_falls_back_as_documented(family, dtype, peak):
    assert peak_flops(TESLA, family, dtype) == peak


def test_peak_missing_names_the_kind_and_what_to_add():
    bare = replace(TESLA, peak_flops={"int8": 1e12})
    with pytest.raises(InputFileError, match=r"'tesla'.*'float32'") as caught:
        estimate_costs(step_graph(), cluster_of(bare))
    assert "float32" in caught.value.hint


ops = st.lists(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(KINDS),
            "dtype": st.sampled_from(DTYPES),
            "flops": st.just(0.0) | st.floats(1, 1e15),
            "bytes_touched": st.integers(0, 2**40),
        }
    ),
    min_size=1,
    max_size=8,
)


@given(ops, st.floats(1, 100), st.floats(1, 100))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_roofline_never_slower_on_a_faster_device(specs, more_flops, more_bandwidth):
    graph = graph_of(specs)
    faster = replace(
        TESLA,
        peak_flops={name: rate * more_flops for name, rate in TESLA.peak_flops.items()},
        memory_bandwidth_bps=TESLA.memory_bandwidth_bps * more_bandwidth,
    )
    slow = estimate_costs(graph, cluster_of(TESLA)).op_s[0]
    fast = estimate_costs(graph, cluster_of(faster)).op_s[0]
    assert np.all(fast <= slow)
    works = (graph.flops > 0) | (graph.bytes_touched > 0)
    assert np.all(fast[works] >= TESLA.launch_s)
    assert np.all(fast[~works] == 0)


@given(ops, st.floats(1, 50))
@settings(derandomize=True, deadline=None, max_examples=30)
def test_roofline_scales_with_all_rates_of_the_device(specs, factor):
    graph = graph_of(specs)
    base = replace(TESLA, launch_s=0.0)
    faster = replace(
        base,
        peak_flops={name: rate * factor for name, rate in base.peak_flops.items()},
        memory_bandwidth_bps=base.memory_bandwidth_bps * factor,
    )
    slow = estimate_costs(graph, cluster_of(base)).op_s[0]
    fast = estimate_costs(graph, cluster_of(faster)).op_s[0]
    np.testing.assert_allclose(fast * factor, slow, rtol=1e-12)


def test_costs_hold_one_row_per_kind_and_map_devices_to_rows():
    costs = estimate_costs(step_graph(), cluster_of(TESLA, CPU, TESLA))
    assert costs.kind_names == ("tesla", "xeon")
    assert costs.device_row.tolist() == [0, 1, 0]
    assert costs.op_s[1, 0] > costs.op_s[0, 0]
    assert costs.sources() == {"model": 12}


def test_costs_of_an_empty_graph_have_no_ops():
    costs = estimate_costs(graph_of([]), cluster_of(TESLA, CPU))
    assert costs.op_s.shape == (2, 0)
    assert costs.sources() == {}


def test_profile_replaces_model_times_by_signature_on_its_kind_only():
    graph = step_graph()
    profile = profile_of([entry_of("mm big", 0.25), entry_of("elsewhere", 9.0)])
    costs = estimate_costs(graph, cluster_of(TESLA, CPU), profile=profile)
    assert costs.op_s[0, [0, 4]].tolist() == [0.25, 0.25]
    assert costs.op_source[0].tolist() == [1, 0, 0, 0, 1, 0]
    assert costs.op_source[1].tolist() == [TimeSource.MODEL] * 6
    assert costs.sources() == {"model": 10, "profile": 2}


def test_profile_prices_unknown_signatures_by_the_roofline_fitted_to_it():
    slow_add = entry_of(
        "other add", 10e-3, kind="aten.add", flops=0.0, bytes_touched=10**9
    )  # a tenth of the bandwidth
    graph = step_graph()
    profile = profile_of([slow_add, entry_of("view", 0.0, kind="aten.view", flops=0.0)])
    costs = estimate_costs(graph, cluster_of(TESLA), profile=profile)
    assert costs.op_s[0, 1] == pytest.approx(10e-3)
    assert costs.op_source[0, 1] == TimeSource.MODEL


def test_replayed_kernels_follow_each_other_sooner_than_those_that_were_timed_on_a_stream():
    entries = [
        entry_of("add small", 2e-6, kind="aten.add", flops=0.0, bytes_touched=10),
        entry_of("mm big", 9e-6),
        entry_of("add big", 0.5e-6, kind="aten.add", flops=0.0, bytes_touched=10**9),
    ]
    on = cluster_of(TESLA)
    profile = profile_of(entries, HostOverhead(forward_s=4e-6, overlaps=True))
    eager, replayed = (
        estimate_costs(step_graph(), on, profile=profile, launches=how)
        for how in ("eager", "replayed")
    )
    # On the stream nothing takes less than 2 us, in a graph 1.2; no op is quicker than that.
    assert replayed.op_s[0, [0, 2, 1]].tolist() == pytest.approx([8.2e-6, 1.2e-6, 0.5e-6])
    assert eager.op_s[0, 0] >= 9e-6
    asked = demand_of(step_graph(), on, replayed)
    assert asked[ON_DEVICE, 0, 0] == pytest.approx(7 / 8.2)
    assert asked[ON_HOST].max() == 0.0


def test_stated_times_win_over_profile_and_model():
    graph = step_graph()
    stated = StatedTimes({"tesla": np.arange(6.0), "cpu": np.full(6, np.inf)})
    graph = replace(graph, stated=stated)
    profile = profile_of([entry_of("mm big", 0.25)], HostOverhead(forward_s=1.0))
    costs = estimate_costs(graph, cluster_of(TESLA, CPU), profile=profile)
    assert costs.op_s[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert np.all(np.isinf(costs.op_s[1]))
    assert costs.sources() == {"file": 12}


def test_stated_transfer_times_hold_only_on_the_cluster_of_the_file():
    graph = step_graph()
    seconds = np.linspace(0.0, 1.0, graph.num_tensors)
    graph = replace(graph, stated=StatedTimes({"*": np.ones(6)}, seconds))
    own = estimate_costs(graph, cluster_of(TESLA, TESLA, uses_stated_times=True))
    noted = replace(cluster_of(TESLA, TESLA), meta={"from": "file"})
    other = estimate_costs(graph, noted)
    assert own.tensor_s is not None
    assert own.tensor_s.tolist() == seconds.tolist()
    assert other.tensor_s is None


def test_settings_rebuild_the_same_costs():
    graph, cluster = step_graph(), cluster_of(TESLA, CPU)
    profile = profile_of(
        [entry_of("mm big", 0.1 + 0.2, workspace_bytes=7)],
        HostOverhead(forward_s=3e-6, backward_s=1e-6, optimizer_s=1e-7, overlaps=True),
    )
    calibration = Calibration({"xeon": KindFit({"matmul": Efficiency(0.1, 1 / 3)}, 1e-7)}, "test")
    costs = estimate_costs(graph, cluster, calibration=calibration, profile=profile)
    again = costs_from_settings(graph, cluster, costs.settings)
    assert np.array_equal(again.op_s, costs.op_s)
    assert np.array_equal(again.op_source, costs.op_source)
    assert again.settings == costs.settings
    plain = estimate_costs(graph, cluster)
    assert not np.array_equal(plain.op_s, costs.op_s)


MM = entry_of("mm big", 0.25)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"profile": profile_of([MM], kind="volta")}, r"profile is of 'volta'.*'tesla', 'xeon'",
         "leave the profile out"),
        ({"calibration": Calibration({"volta": KindFit(), "k80": KindFit()})},
         r"calibration is of 'volta', 'k80'.*'tesla', 'xeon'", "leave the calibration out"),
        ({"calibration": Calibration({})}, "calibration is of no kind", "on this hardware"),
        ({"profile": profile_of([entry_of("mm of another batch", 0.1)])},
         "no time for any of the 6 ops of 'ops'", "same model and batch"),
        ({"profile": profile_of([])}, "profile of 'tesla' has no measured times", "--seconds"),
        ({"profile": profile_of([entry_of("mm big", 0.0)])}, "no measured times", "--seconds"),
    ],
)  # fmt: skip
def test_costs_refuse_what_says_nothing_about_the_problem(options, message, hint):
    graph, cluster = step_graph(), cluster_of(TESLA, CPU)
    with pytest.raises(UsageError, match=message) as caught:
        estimate_costs(graph, cluster, **options)
    assert hint in caught.value.hint


def test_costs_take_a_calibration_of_some_kinds():
    fit = KindFit({"matmul": Efficiency(0.1, 0.1)})
    calibration = Calibration({"volta": fit, "xeon": fit})
    costs = estimate_costs(step_graph(), cluster_of(TESLA, CPU), calibration=calibration)
    plain = estimate_costs(step_graph(), cluster_of(TESLA, CPU))
    assert costs.op_s[0].tolist() == plain.op_s[0].tolist()
    assert costs.op_s[1].tolist() != plain.op_s[1].tolist()


def test_settings_that_do_not_fit_the_plan_are_an_error_of_their_file():
    graph = step_graph()
    costs = estimate_costs(graph, cluster_of(TESLA), profile=profile_of([MM]))
    with pytest.raises(InputFileError, match="profile is of 'tesla'") as caught:
        costs_from_settings(graph, cluster_of(CPU), costs.settings)
    assert caught.value.where == "settings of the costs"


def test_reserved_bytes_are_those_of_the_profiled_kind():
    graph, cluster = step_graph(), cluster_of(CPU, TESLA, TESLA)
    assert estimate_costs(graph, cluster).reserved_bytes.tolist() == [0, 0]
    profile = replace(profile_of([MM]), reserved_bytes=2**25)
    costs = estimate_costs(graph, cluster, profile=profile)
    assert costs.reserved_bytes.tolist() == [0, 2**25]
    assert costs.reserved_bytes[costs.device_row].tolist() == [0, 2**25, 2**25]
    again = costs_from_settings(graph, cluster, costs.settings)
    assert again.reserved_bytes.tolist() == [0, 2**25]


def test_settings_with_an_unknown_key_are_refused():
    with pytest.raises(InputFileError, match="unknown key 'profil'") as caught:
        costs_from_settings(step_graph(), cluster_of(TESLA), {"profil": None})
    assert caught.value.hint == "did you mean 'profile'?"
    assert caught.value.where == "settings of the costs"
