"""Runs of users: what they correct, how ranges narrow, and the commands that take them."""

import json
import math

import pytest
from cli.terminal import hocket

from hocket.base.errors import InputFileError, UsageError
from hocket.cost.calibrate import Calibration, calibration_from_dict, calibration_to_dict
from hocket.cost.measured_steps import StepRun, fit_steps, read_runs, run_record
from hocket.cost.ranges import DATASHEET, scale_of, source_of, step_range
from hocket.cost.roofline import estimate_costs, work_on
from hocket.graph.generators import generate
from hocket.plan.make import make_problem


def run_of(ratio, source="datasheet", scale=1.0):
    return StepRun(
        model="gpt2", device_types=("t4",), source=source, scale=scale, predicted_s=0.1,
        measured_s=0.1 * ratio,
    )  # fmt: skip


def width(found):
    return math.log(found.high / found.low)


def test_runs_that_agree_narrow_the_range_and_move_its_middle():
    plain = width(DATASHEET)
    one, five = (fit_steps([run_of(1.4)] * count)["t4"] for count in (1, 5))
    assert width(five) < 0.6 * plain < width(one) < 1.01 * plain
    assert 1.09 < one.scale < five.scale < 1.4
    # Runs that disagree say that the range is as wide as they are.
    apart = fit_steps([run_of(0.6), run_of(1.6), run_of(1.0), run_of(0.7), run_of(1.5)])["t4"]
    assert width(apart) > plain


def test_a_prediction_that_was_corrected_before_is_not_corrected_twice():
    again = fit_steps([run_of(1.0, "runs", scale=1.4)] * 5)["t4"]
    assert again.scale == pytest.approx(fit_steps([run_of(1.4)] * 5)["t4"].scale)
    with pytest.raises(UsageError, match="profiled costs"):
        fit_steps([run_of(1.0, "profiled")])


def test_a_calibration_of_runs_scales_all_op_times_and_their_parts():
    problem = make_problem(generate("chain", 8, 0), "1xt4")
    steps = fit_steps([run_of(1.4)] * 5)
    calibration = Calibration({}, "5 runs", steps)
    again = calibration_from_dict(calibration_to_dict(calibration), "calibration")
    assert again.steps == steps
    costs = estimate_costs(problem.graph, problem.cluster, calibration=again)
    scale = steps["t4"].scale
    assert costs.op_s == pytest.approx(scale * problem.costs.op_s)
    kind = problem.cluster.kinds[0]
    plain = work_on(problem.graph, kind, problem.costs.settings)
    assert work_on(problem.graph, kind, costs.settings).device_s == pytest.approx(
        scale * plain.device_s
    )
    assert (source_of(costs.settings), scale_of(costs.settings)) == ("runs", scale)
    assert step_range(costs) == steps["t4"]


def test_commands_take_what_a_run_printed(tmp_path):
    problem = make_problem(generate("chain", 8, 0), "1xt4")
    record = run_record("chain", problem.cluster, problem.costs.settings, 0.1, 0.13)
    file, written = tmp_path / "run.json", tmp_path / "calibration.json"
    file.write_text(json.dumps({"backend": "auto", "record": record}))
    assert read_runs([file])[0].measured_s == 0.13
    assert "-23.1%" in hocket("validate", "--mine", file).stdout
    out = hocket("calibrate", "--from", file, "-o", written).stdout
    assert "t4: steps take 1.1" in out
    assert json.loads(written.read_text())["steps"]["t4"]["rows"] == 1


def test_wrong_use_is_explained(tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"schema": "hocket.run/1", "model": "x"}))
    with pytest.raises(InputFileError, match="device_types"):
        read_runs([file])
    hocket("validate", "--mine", expect=2)
    hocket("calibrate", "-o", tmp_path / "c.json", expect=2)
