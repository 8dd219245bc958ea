"""Fitting coefficients: what is hidden is found, what is wrong is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from cost.parallel_samples import cluster_of, gpt
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import InputFileError, UsageError
from hocket.cli.root import root
from hocket.cost.parallel.calibrate import calibrate, prediction_errors
from hocket.cost.parallel.coefficients import (
    NAMES,
    Coefficients,
    coefficients_from_dict,
    coefficients_to_dict,
    read_coefficients,
    write_coefficients,
)
from hocket.cost.parallel.measured_runs import MeasuredRun, read_runs
from hocket.cost.parallel.softwares import find_software
from hocket.cost.parallel.stages import stage_costs
from hocket.cost.parallel.step import predict
from hocket.transformer import ParallelConfig, ParallelConfigs

ON = "8xdgx-a100-80g"
SOFTWARE = find_software("megatron-2021")
CONFIGS = [
    ParallelConfig(tensor=t, pipeline=p, data=64 // (t * p), microbatch=b, global_batch=256,
             recompute="full")
    for t, p, b in (
        (1, 1, 1), (1, 1, 4), (2, 1, 2), (4, 1, 4), (8, 1, 1), (8, 2, 4), (4, 4, 1), (2, 8, 2),
        (1, 8, 1), (8, 8, 2), (2, 2, 1), (1, 4, 2), (4, 2, 2), (8, 4, 1),
    )
]  # fmt: skip
MODELS = (gpt(2048, 24, 16), gpt(6144, 40, 48))


def runs_with(coefficients: Coefficients, seed: int = 0, noise: float = 0.0) -> list[MeasuredRun]:
    random = np.random.default_rng(seed)
    runs = []
    for index, config in enumerate(CONFIGS):
        model = MODELS[index % 2]
        exact = predict(model, ParallelConfigs.of([config]), cluster_of(ON), SOFTWARE, coefficients)
        step_s = float(exact.step_s[0] * np.exp(noise * random.standard_normal()))
        runs.append(MeasuredRun(model=model, config=config, software=SOFTWARE, step_s=step_s))
    return runs


def test_runs_as_predicted_leave_all_coefficients_at_one() -> None:
    fitted = calibrate(runs_with(Coefficients()), cluster_of(ON))
    assert all(getattr(fitted, name) == pytest.approx(1.0, abs=1e-6) for name in NAMES)
    assert fitted.source == f"14 runs on {ON}"


@settings(derandomize=True, deadline=None, max_examples=4)
@given(st.lists(st.floats(0.75, 1.33), min_size=12, max_size=12))
def test_other_runs_of_the_same_cluster_are_predicted_better(values: list[float]) -> None:
    truth = Coefficients(**dict(zip(NAMES, values, strict=True)))
    runs = runs_with(truth)
    fitted = calibrate(runs[:10], cluster_of(ON))
    before = np.abs(prediction_errors(runs[10:], cluster_of(ON), Coefficients())).mean()
    after = np.abs(prediction_errors(runs[10:], cluster_of(ON), fitted)).mean()
    assert after < 0.05
    assert after < 0.03 or after < 0.7 * before


def test_one_wrong_run_changes_little() -> None:
    runs = runs_with(Coefficients(matrix=1.15), noise=0.01)
    wrong = [replace(runs[0], step_s=3 * runs[0].step_s), *runs[1:10]]
    fitted = calibrate(wrong, cluster_of(ON))
    assert np.abs(prediction_errors(runs[10:], cluster_of(ON), fitted)).max() < 0.06


def test_what_no_run_depends_on_stays_one() -> None:
    alone = [
        MeasuredRun(
            model=MODELS[0],
            config=ParallelConfig(microbatch=b, global_batch=b * m),
            software=SOFTWARE,
            step_s=0.3 * b * m,
        )
        for b, m in ((1, 4), (2, 4), (4, 2))
    ]
    fitted = calibrate(alone, cluster_of("1xdgx-a100-80g"))
    for name in ("tensor", "network", "pipeline", "latency", "unaligned"):
        assert getattr(fitted, name) == pytest.approx(1.0)


def test_too_few_runs_and_too_small_clusters_are_refused() -> None:
    runs = runs_with(Coefficients())
    with pytest.raises(UsageError, match="2 measured runs are too few"):
        calibrate(runs[:2], cluster_of(ON))
    with pytest.raises(UsageError, match="a run used 64 devices but '1xdgx-a100-80g' has 8"):
        calibrate(runs, cluster_of("1xdgx-a100-80g"))


def test_runs_share_what_no_coefficient_explains_with_runs_like_them() -> None:
    """A config that is slow for a reason of its own is so for its neighbours, not for all."""
    runs = runs_with(Coefficients())
    slow = [
        replace(run, step_s=1.1 * run.step_s) if run.config.tensor == 8 else run for run in runs
    ]
    fitted = calibrate(slow[:9], cluster_of(ON))
    before, after = (
        np.abs(prediction_errors(slow, cluster_of(ON), coefficients))
        for coefficients in (Coefficients(), fitted)
    )
    measured = [4, 5]
    assert (after[measured] < 0.2 * before[measured]).all()
    assert (after[[0, 1, 2, 7, 8]] < 0.01).all()
    # Others with as many tensor-parallel ranks, which were not measured.
    assert after[9] < before[9]
    assert after[13] < before[13]


def test_steps_their_parts_and_their_stages_follow_measured_runs() -> None:
    anchor_of = calibrate(
        [replace(run, step_s=1.2 * run.step_s) for run in runs_with(Coefficients())],
        cluster_of(ON),
    )
    plain = replace(anchor_of, anchors=())
    model, config = MODELS[1], CONFIGS[7]
    figures, without = (
        predict(model, ParallelConfigs.of([config]), cluster_of(ON), SOFTWARE, coefficients)
        for coefficients in (anchor_of, plain)
    )
    factor = figures.step_s[0] / without.step_s[0]
    assert factor == pytest.approx(float(figures.factor[0]))
    assert abs(factor - 1) > 0.001
    assert sum(part[0] for part in figures.parts().values()) == pytest.approx(figures.step_s[0])
    costs, plain_costs = (
        stage_costs(model, config, cluster_of(ON), SOFTWARE, coefficients)
        for coefficients in (anchor_of, plain)
    )
    for name in ("forward_s", "input_gradient_s", "weight_gradient_s", "send_s", "after_s"):
        scaled = [factor * seconds for seconds in getattr(plain_costs, name)]
        assert getattr(costs, name) == pytest.approx(scaled)


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def test_coefficients_survive_their_file(tmp_path: Path) -> None:
    coefficients = Coefficients(matrix=1.25, network=0.5, source="here")
    write_coefficients(coefficients, tmp_path / "c.json")
    assert read_coefficients(tmp_path / "c.json") == coefficients
    assert coefficients_from_dict(coefficients_to_dict(Coefficients())) == Coefficients()
    fitted = calibrate(runs_with(Coefficients(matrix=1.1)), cluster_of(ON))
    assert coefficients_from_dict(coefficients_to_dict(fitted)) == fitted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matrx": 1.0}, "unknown key 'matrx'"),
        ({"matrix": "fast"}, "matrix is 'fast'"),
        ({"matrix": 0}, "matrix is 0"),
        ({"matrix": 1e9}, "matrix is 1000000000.0"),
        ({"schema": "other/1"}, "schema is 'other/1'"),
        ({"anchors": 3}, "anchors is 3"),
        ({"anchors": [{"program": "x", "place": [1.0], "weight": 0.0}]}, "place"),
        ({"anchors": [{"program": "x", "place": [0.0] * 15, "weight": 1e9}]}, "weight"),
    ],
)
def test_wrong_coefficient_files_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputFileError, match=message):
        coefficients_from_dict({**coefficients_to_dict(Coefficients()), **change})


HEADER = "tensor,pipeline,data,microbatch,global_batch,hidden,layers,heads,iter_time_s"


def table(tmp_path: Path, *rows: str, header: str = HEADER) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(["# source: a test", header, *rows]) + "\n")
    return path


def test_runs_are_read_with_their_defaults(tmp_path: Path) -> None:
    path = table(tmp_path, "8,2,4,1,64,4096,32,32,3.5", "1,1,1,1,4,1024,16,16,")
    run, untimed = read_runs(path, SOFTWARE, recompute="full")
    assert untimed.step_s is None
    assert run.step_s == 3.5
    assert run.config == ParallelConfig(
        tensor=8, pipeline=2, data=4, microbatch=1, global_batch=64, recompute="full"
    )
    assert (run.model.sequence, run.model.vocabulary, run.model.head_width) == (2048, 51200, 128)


def test_fields_of_model_and_program_are_columns(tmp_path: Path) -> None:
    header = "model,layers,software,gradient_bytes,TP,MBS,GBS,stages,PP,step_ms,gpus"
    path = table(tmp_path, "llama3-8b,6,megatron-core,2,2,1,16,2 4,2,140.5,4", header=header)
    (run,) = read_runs(path)
    assert run.step_s == pytest.approx(0.1405)
    assert run.config.layers == (2, 4)
    assert (run.model.layers, run.model.hidden) == (6, 4096)
    assert (run.software.name, run.software.gradient_bytes) == ("megatron-core", 2)


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        (HEADER.replace("tensor", "tensr"), "1,1,1,1,1,64,2,2,1", "unknown column 'tensr'"),
        (HEADER.replace(",hidden", ""), "1,1,1,1,1,2,2,1", "has no key 'hidden'"),
        (HEADER.replace(",iter_time_s", ""), "1,1,1,1,1,64,2,2", "has no column 'step_s'"),
        (HEADER + ",tp", "1,1,1,1,1,64,2,2,1,1", "two columns mean 'tensor'"),
        (HEADER, "0,1,1,1,1,64,2,2,1", "tensor is 0"),
        (HEADER, "1.5,1,1,1,1,64,2,2,1", "tensor is 1.5"),
        (HEADER, "1,1,1,1,1,64,2,2,-1", "step_s is -1"),
        (HEADER, "1,1,1,1,1,64,2,2,nan", "step_s is nan"),
        (HEADER, "1,1,1,1,1,65,2,2,1", "cannot be shared by 2 heads"),
        (HEADER, "1,1,8,1,4,64,2,2,1", "global_batch is 4"),
        (HEADER + ",recompute", "1,1,1,1,1,64,2,2,1,some", "recompute is 'some'"),
        (HEADER + ",zero", "1,1,1,1,1,64,2,2,1,7", "zero is 7"),
        (HEADER + ",sp", "1,1,1,1,1,64,2,2,1,maybe", "sequence_parallel is 'maybe'"),
        (HEADER + ",attention", "1,1,1,1,1,64,2,2,1,fast", "attention is 'fast'"),
        (HEADER + ",gap_s", "1,1,1,1,1,64,2,2,1,long", "gap_s is 'long'"),
        (HEADER + ",n_gpus", "8,8,4,4,2048,1024,80,16,147,320", "num_devices is 320"),
        (HEADER, "1,1,1,3,8,64,2,2,1", "global_batch is 8"),
        (HEADER, "1,1", "another number of cells"),
        (HEADER, "1,1,1,1,1,64,2,2,1,7", "another number of cells"),
    ],
)
def test_wrong_tables_are_refused(tmp_path: Path, header: str, row: str, message: str) -> None:
    with pytest.raises(InputFileError, match=message):
        read_runs(table(tmp_path, row, header=header), SOFTWARE)


# ── the command ──────────────────────────────────────────────────────────────────────────────────


def written(tmp_path: Path, runs: list[MeasuredRun]) -> Path:
    rows = [
        ",".join(
            map(str, (run.config.tensor, run.config.pipeline, run.config.data,
                      run.config.microbatch, run.config.global_batch, run.model.hidden,
                      run.model.layers, run.model.heads, run.step_s))
        )
        for run in runs
    ]  # fmt: skip
    return table(tmp_path, *rows)


def test_the_command_writes_what_the_fit_gives(tmp_path: Path) -> None:
    runs = runs_with(Coefficients(matrix=1.2))[:10]
    path, output = written(tmp_path, runs), tmp_path / "coefficients.json"
    result = CliRunner().invoke(
        root,
        ["calibrate", "parallel", str(path), "--on", ON, "-o", str(output), "--software",
         "megatron-2021", "--json"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    fitted = calibrate(runs, cluster_of(ON))
    assert answer["runs"] == 10
    assert answer["mean_error_after"] < 0.02 < answer["mean_error_before"]
    for name in NAMES:
        assert answer["coefficients"][name] == pytest.approx(getattr(fitted, name), rel=1e-6)
        assert getattr(read_coefficients(output), name) == answer["coefficients"][name]


def test_the_command_takes_arithmetic_that_the_devices_have(tmp_path: Path) -> None:
    runs = [run for run in runs_with(Coefficients()) if run.config.tensor < 8]
    result = CliRunner().invoke(
        root,
        ["calibrate", "parallel", str(written(tmp_path, runs)), "--on", "8xdgx1-v100",
         "-o", str(tmp_path / "c.json"), "--software", "megatron-core"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output


def test_the_command_shows_a_table(tmp_path: Path) -> None:
    path = written(tmp_path, runs_with(Coefficients())[:5])
    result = CliRunner().invoke(
        root,
        ["calibrate", "parallel", str(path), "--on", ON, "-o", str(tmp_path / "c.json"),
         "--software", "megatron-2021"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "before   mean error   0.0%" in result.stdout
    assert "5 runs" in result.stdout


def test_profiles_still_are_the_usual_argument(tmp_path: Path) -> None:
    for order in (["none.json", "-o", "x.json"], ["-o", "x.json", "none.json"]):
        result = CliRunner().invoke(root, ["calibrate", *order])
        assert isinstance(result.exception, InputFileError)
        assert "no such file" in str(result.exception)
    assert "parallel" in CliRunner().invoke(root, ["calibrate", "--help"]).stdout


@pytest.mark.parametrize("factor", [1e-3, 1e3, 1e-30])
def test_runs_in_other_units_are_refused_with_what_was_expected(factor):
    model = gpt(2048, 24, 16)
    runs = [MeasuredRun(model=model, config=d, software=SOFTWARE, step_s=s) for d, s in zip(
        CONFIGS[:4],
        predict(model, ParallelConfigs.of(CONFIGS[:4]), cluster_of(ON), SOFTWARE).step_s,
        strict=True,
    )]  # fmt: skip
    calibrate(runs, cluster_of(ON))
    runs[2] = replace(runs[2], step_s=factor * runs[2].step_s)
    with pytest.raises(UsageError, match=r"run 3 took .* where .* predicted"):
        calibrate(runs, cluster_of(ON))
