"""The benchmark script, run on the smallest case: it must not rot between releases."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from cost.cost_samples import TESLA, cluster_of, entry_of, profile_of, step_graph

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cost" / "predict.py"


@pytest.fixture(scope="module")
def predict():
    spec = importlib.util.spec_from_file_location("benchmark_predict", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # Where a script that is started finds its neighbours.
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_predict_script_compares_prediction_and_run(predict, monkeypatch, tmp_path, capsys):
    small = predict.Case("mlp", 4, 1, "float32", "fit")
    absent = predict.Case("no-such-model", 4, 1, "float32", "held out")
    monkeypatch.setitem(predict.CASES, "cpu", (small, absent))
    monkeypatch.setattr(sys, "argv", ["predict.py", "--device", "cpu", "--out", str(tmp_path)])
    threads = torch.get_num_threads()
    try:
        predict.main()
    finally:
        torch.set_num_threads(threads)
    results = json.loads((tmp_path / "results.json").read_text())
    ran, failed = results["cases"]
    assert ran["missing"] == {}
    for key in ("measured_s", "profile_s", "calibrated_s", "default_s"):
        assert ran[key] > 0
    assert set(ran["measured_phases_s"]) == set(ran["profile_phases_s"])
    assert "unknown model 'no-such-model'" in failed["error"]
    assert capsys.readouterr().out == (tmp_path / "table.md").read_text()
    assert {"profile.json", "calibration.json"} <= {path.name for path in tmp_path.iterdir()}


def test_predicted_peak_counts_rounding_workspace_and_reserve(predict):
    graph = step_graph()
    profile = profile_of([entry_of("mm big", 1e-3, workspace_bytes=1000)])
    peak = predict.predicted_peak_bytes(graph, cluster_of(TESLA), profile)
    # The batch stays, one result lives at a time, and the product holds its workspace: 2 blocks.
    assert peak == 512 + 512 + 1024


def test_cuda_clock_reads_milliseconds_between_events(predict, monkeypatch):
    class Event:
        times = iter([1.0, 4.0])

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at_ms = next(self.times)

        def elapsed_time(self, end):
            return end.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = predict.CudaClock()
    clock.mark("start")
    clock.mark("forward")
    assert clock.seconds(clock.marks()) == {"forward": pytest.approx(3e-3)}


def test_table_shows_errors_of_failed_cases_and_skips_missing_numbers(predict):
    rows = [
        {"case": "a", "role": "fit", "measured_s": 1.0, "profile_s": 1.1, "num_ops": 3,
         "measured_peak_bytes": 2**30, "predicted_peak_bytes": 2**30},
        {"case": "b", "role": "held out", "error": "it | broke"},
    ]  # fmt: skip
    machine = {"device": "d", "versions": {}, "date": "", "command": ""}
    text = predict.table(rows, machine, predict.summarise(rows))
    assert "1.1 s (+10.0%)" in text
    assert "1.0 GiB (+0.0%)" in text
    assert "it / broke" in text
    assert "median error, step, profile: 10.0%" in text
    assert np.all([line.count("|") in (0, 10) for line in text.splitlines()])
