import json
from dataclasses import replace

import numpy as np
import pytest
from cost.cost_samples import CPU, TESLA, cluster_of, entry_of, graph_of, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import InputFileError, UsageError
from hocket.cost.calibrate import (
    Calibration,
    calibrate,
    calibration_errors,
    calibration_from_dict,
    calibration_to_dict,
    read_calibration,
    write_calibration,
)
from hocket.cost.efficiency import Efficiency, KindFit, default_efficiency, ideal_s, roofline_s
from hocket.cost.families import FAMILIES
from hocket.cost.host import ISSUE, HostOverhead
from hocket.cost.profile import write_profile
from hocket.cost.roofline import estimate_costs

KIND_OF = {"matmul": "aten.mm", "convolution": "aten.convolution", "elementwise": "aten.add"}


def synthetic_profile(fit, seed, num_entries=30):
    """A profile whose times are exactly those of a known fit."""
    random = np.random.default_rng(seed)
    entries = []
    for family, kind in KIND_OF.items():
        for dtype in ("float32", "float16"):
            for index in range(num_entries):
                size = 10.0 ** random.uniform(1, 9)
                intensity = 10.0 ** random.uniform(-1, 2.5) if family != "elementwise" else 0.0
                entries.append(
                    entry_of(
                        f"{family} {dtype} {index}",
                        0.0,
                        kind=kind,
                        dtype=dtype,
                        flops=size * intensity,
                        bytes_touched=int(size),
                        count=int(random.integers(1, 50)),
                    )
                )
    profile = profile_of(entries)
    seconds = roofline_s(profile.work(), TESLA, fit)
    timed = (replace(e, seconds=float(s)) for e, s in zip(profile.entries, seconds, strict=True))
    return profile_of(timed)


efficiencies = st.builds(Efficiency, st.floats(0.1, 0.95), st.floats(0.1, 0.95))


@given(
    st.fixed_dictionaries(
        {f"{family}/{d}": efficiencies for family in KIND_OF for d in ("float32", "float16")}
    ),
    st.floats(1e-7, 3e-5),
    st.integers(0, 1000),
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_calibrate_recovers_planted_efficiencies(planted, launch_s, seed):
    truth = KindFit(planted, launch_s)
    profile = synthetic_profile(truth, seed)
    fit = calibrate(profile, TESLA).kinds["tesla"]
    assert fit.launch_s == pytest.approx(launch_s)
    # Parts with too little of the time keep their defaults; most have enough.
    fitted = fit.efficiency.keys() & planted.keys()
    assert len(fitted) >= 4
    for error in calibration_errors(Calibration({"tesla": fit}), profile, TESLA):
        if {f"{error.family}/float32", f"{error.family}/float16"} <= fitted:
            assert abs(error.error) < 1e-6
    compute_s, memory_s = ideal_s(profile.work(), TESLA)
    for key in sorted(fitted):
        member = np.array([e.signature.startswith(key.replace("/", " ")) for e in profile.entries])
        by_compute = compute_s[member] / planted[key].compute
        by_memory = memory_s[member] / planted[key].memory
        # A side that limits no op cannot be seen in the times.
        if np.any(by_compute > np.maximum(by_memory, launch_s)):
            assert fit.efficiency[key].compute == pytest.approx(planted[key].compute, rel=1e-6)
        if np.any(by_memory > np.maximum(by_compute, launch_s)):
            assert fit.efficiency[key].memory == pytest.approx(planted[key].memory, rel=1e-6)


@given(st.integers(0, 1000), st.floats(0.05, 20))
@settings(derandomize=True, deadline=None, max_examples=12)
def test_calibrate_is_not_moved_far_by_one_wild_measurement(seed, factor):
    truth = KindFit({family: Efficiency(0.5, 0.5) for family in FAMILIES}, 1e-6)
    profile = synthetic_profile(truth, seed)
    small = min((e for e in profile.entries if e.seconds > 1e-5), key=lambda e: e.seconds * e.count)
    wild = [
        replace(e, seconds=e.seconds * factor, count=1) if e is small else e
        for e in profile.entries
    ]
    fit = calibrate(profile_of(wild), TESLA).kinds["tesla"]
    for key, efficiency in fit.efficiency.items():
        if "/" not in key:
            assert efficiency.memory == pytest.approx(0.5, rel=0.05)


def test_calibrate_total_agrees_when_ops_of_a_family_differ():
    entries = [
        entry_of("fast", 2e-3, kind="aten._softmax", flops=0.0, bytes_touched=10**9, count=3),
        entry_of("slow", 9e-3, kind="aten._softmax", flops=0.0, bytes_touched=10**9),
    ]
    profile = profile_of(entries)
    (error,) = calibration_errors(calibrate(profile, TESLA), profile, TESLA)
    assert error.measured_s == pytest.approx(15e-3)
    assert error.predicted_s == pytest.approx(15e-3)


def test_calibrate_keeps_the_default_without_enough_evidence():
    entries = [
        entry_of("large", 1.0, kind="aten.add", flops=0.0, bytes_touched=10**11),
        entry_of("small", 1e-4, kind="aten.mm", flops=1e6, bytes_touched=10**4),
    ]
    fit = calibrate(profile_of(entries), TESLA).kinds["tesla"]
    assert fit.of("matmul", "float32", TESLA) == default_efficiency("matmul", "float32", TESLA)
    assert fit.of("elementwise", "float32", TESLA).memory == pytest.approx(0.1)


def test_calibrate_serves_unmeasured_types_by_the_family():
    entries = [entry_of("add", 10e-3, kind="aten.add", flops=0.0, bytes_touched=10**9)]
    fit = calibrate(profile_of(entries), TESLA).kinds["tesla"]
    assert fit.of("elementwise", "bfloat16", TESLA).memory == pytest.approx(0.1)


def test_calibrate_carries_the_host_overhead_to_other_models():
    host = HostOverhead(forward_s=1e-3, backward_s=1e-3, optimizer_s=1e-3, overlaps=True)
    calibration = calibrate(profile_of([entry_of("mm", 1e-3)], host), TESLA)
    graph = graph_of([{"kind": "aten.view"}] * 10)
    costs = estimate_costs(graph, cluster_of(TESLA), calibration=calibration)
    assert costs.op_s.sum() == pytest.approx(10e-3 * ISSUE["view"][0])


def test_calibration_carries_the_figures_that_it_refers_to():
    """CPUs are measured anew each time; that must not change calibrated times."""
    calibration = calibrate(synthetic_profile(KindFit(), 0), TESLA)
    today = replace(TESLA, peak_flops={"float32": 7e12}, memory_bandwidth_bps=3e11, launch_s=1e-3)
    graph = graph_of([{"kind": "aten.mm", "flops": 1e12, "bytes_touched": 10**6},
                      {"kind": "aten.add", "bytes_touched": 10**9},
                      {"kind": "aten.add", "bytes_touched": 1}])  # fmt: skip
    one = estimate_costs(graph, cluster_of(TESLA), calibration=calibration)
    other = estimate_costs(graph, cluster_of(today), calibration=calibration)
    assert one.op_s.tolist() == other.op_s.tolist()
    assert one.op_s.tolist() != estimate_costs(graph, cluster_of(today)).op_s.tolist()


def test_calibrate_refuses_another_kind():
    with pytest.raises(UsageError, match="'tesla', not of 'xeon'"):
        calibrate(profile_of([entry_of("mm", 1e-3)]), CPU)


@pytest.mark.parametrize("entries", [[], [entry_of("mm", 0.0), entry_of("add", 0.0)]])
def test_calibrate_refuses_a_profile_without_times(entries):
    with pytest.raises(UsageError, match="no measured times") as caught:
        calibrate(profile_of(entries), TESLA)
    assert "--seconds" in caught.value.hint


def test_calibrate_survives_times_without_work():
    profile = profile_of([entry_of("x", 1.0, flops=0.0, bytes_touched=0), entry_of("mm", 0.0)])
    fit = calibrate(profile, TESLA).kinds["tesla"]
    assert fit.efficiency == {}
    assert fit.launch_s == TESLA.launch_s


def test_calibration_file_of_another_sort_is_named_whatever_its_size(tmp_path):
    entries = [entry_of(f"a long signature, as they are {index}", 1.0) for index in range(10_000)]
    write_profile(profile_of(entries), tmp_path / "p.json")
    assert (tmp_path / "p.json").stat().st_size > 2**20
    with pytest.raises(InputFileError) as caught:
        read_calibration(tmp_path / "p.json")
    assert caught.value.message == "this is a hocket.profile/1 file, expected hocket.calibration/1"
    assert "--profile" in caught.value.hint


def test_calibration_file_round_trips_and_is_deterministic(tmp_path):
    fit = KindFit({"matmul/float16": Efficiency(0.1, 1 / 3), "copy": Efficiency(1.0, 2.0)}, None)
    figures = replace(fit, launch_s=1e-6, peak_flops={"tf32": 1e12}, memory_bandwidth_bps=3e9)
    calibration = Calibration({"b": fit, "a": figures}, "somewhere")
    write_calibration(calibration, tmp_path / "one.json")
    again = read_calibration(tmp_path / "one.json")
    assert again.kinds == calibration.kinds
    assert again.source == "somewhere"
    write_calibration(again, tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


TESLA_FIT = ("kinds", "tesla")
COPY = (*TESLA_FIT, "efficiency", "copy")


@pytest.mark.parametrize(
    ("path", "value", "message", "hint"),
    [
        (("schema",), "calibration", "schema is 'calibration'", "hocket.calibration/1"),
        (("kinds",), [], "kinds is []", "expected an object of names"),
        ((*TESLA_FIT, "eficiency"), {}, "'eficiency' in kinds.tesla", "'efficiency'"),
        (
            (*TESLA_FIT, "efficiency", "matmull"),
            {},
            "'matmull' in kinds.tesla.efficiency",
            "'matmul'",
        ),
        ((*COPY, "memory"), 0, "kinds.tesla.efficiency.copy.memory is 0", "a number from 0.0001"),
        ((*COPY, "memory"), True, "kinds.tesla.efficiency.copy.memory is True", "a number from"),
        ((*TESLA_FIT, "launch_s"), -1, "kinds.tesla.launch_s is -1", "a number from 0 to 1e+06"),
        ((*TESLA_FIT, "launch_s"), 10**400, "kinds.tesla.launch_s is 1000", "a number from 0"),
        ((*TESLA_FIT, "peak_flops"), {"float31": 1}, "unknown key 'float31'", "'float32'"),
        ((*TESLA_FIT, "memory_bandwidth_bps"), "1GB/s", "_bandwidth_bps is '1GB/s'", "a number"),
        ((*TESLA_FIT, "host", "overlaps"), 1, "kinds.tesla.host.overlaps is 1", "true or false"),
    ],
)
def test_calibration_file_refuses_what_it_does_not_know(path, value, message, hint):
    fit = KindFit({"copy": Efficiency(0.5, 0.5)}, 1e-6)
    data = json.loads(json.dumps(calibration_to_dict(Calibration({"tesla": fit}))))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InputFileError) as caught:
        calibration_from_dict(data, "my.json")
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.where == "my.json"
