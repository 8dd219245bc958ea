"""``hocket run`` as a user types it, also when it is interrupted or killed."""

import json
import os
import signal
import statistics
from dataclasses import replace

import numpy as np
import psutil
import pytest
from forked_command import ForkedCommand
from forked_worker_group import forked_worker_groups
from runtime.placements import random_placement

from hocket.base.errors import UsageError
from hocket.capture import capture, load_model
from hocket.cli import main
from hocket.plan.files import read_plan, write_plan
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.runtime.planned_model import build
from hocket.runtime.run import choose_backend
from hocket.runtime.run_options import RunOptions, middle_step
from hocket.runtime.step_record import StepRecord
from hocket.simulate import simulate

FACTORY = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(),
                                    nn.Dropout(), nn.Linear(width, 4))
    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)
def make(batch=4):
    return Net(8), {"x": torch.randn(batch, 8), "y": torch.randn(batch, 4)}
def other(batch=4):
    return Net(9), {"x": torch.randn(batch, 8), "y": torch.randn(batch, 4)}
class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4).double()
    def forward(self, x):
        return self.layer(x).square().mean()
def time_first(batch=2):
    return Double(), {"x": torch.randn(7, batch, 4).double()}
class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
    def forward(self, x):
        chosen = (x[:, 0] > 0).nonzero()[:, 0]
        return self.layer(x[chosen]).square().mean()
def sparse(batch=4):
    return Sparse(), {"x": torch.ones(batch, 8)}
def bad(batch=4):
    model, batch = make(batch)
    batch["y"].fill_(float("nan"))
    return model, batch
"""


@pytest.fixture
def plan_file(tmp_path, monkeypatch):
    """A plan of a user's model on two devices."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FACTORY)
    return save_plan(tmp_path / "plan.json", "mine.py:make", batch=6)


def save_plan(path, spec, **options):
    model, batch = load_model(spec, **options)
    problem = make_problem(capture(model, batch, name=spec, device="cpu"), "2xv100-16g")
    plan = Plan(planner="random").placing(random_placement(problem.graph, 2, 0))
    assert len(np.unique(plan.device_of)) == 2
    timeline = simulate(problem, plan)
    write_plan(path, problem, plan.claiming(step_s=timeline.makespan_s))
    return path


def test_run_prints_losses_and_writes_both_timelines(plan_file, capsys):
    main(["run", str(plan_file), "--steps", "3", "--backend", "single", "--json",
          "--trace", "out.json"])  # fmt: skip
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert [step["step"] for step in result["steps"]] == [1, 2, 3]
    assert result["losses"] == [step["loss"] for step in result["steps"]]
    assert len(set(result["losses"])) == 3
    assert result["backend"] == "single"
    assert result["step_s"]["predicted"] > 0
    assert result["step_s"]["measured"] > 0
    assert [device["name"] for device in result["devices"]] == ["gpu0", "gpu1"]
    for device in result["devices"]:
        assert 0 < device["busy_s"]["measured"] <= result["step_s"]["measured"]
        peak = device["peak_bytes"]
        assert peak["measured"] == pytest.approx(peak["predicted"], rel=0.1)
    assert err.count("loss") == 3
    events = json.loads(plan_file.with_name("out.json").read_text())["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert {name.partition(" · ")[2] for name in names} == {"predicted", "measured"}
    assert len(set(names.values())) == len(names)
    num_ops = read_plan(plan_file).problem.graph.num_ops
    slices = [e for e in events if e["ph"] == "X" and "op" in e["args"]]
    assert len(slices) == 2 * num_ops


def test_run_with_processes_prints_a_table_and_the_same_losses(plan_file, capsys):
    main(["run", str(plan_file), "--steps", "2", "--backend", "single", "--json"])
    expected = json.loads(capsys.readouterr().out)["losses"]
    with forked_worker_groups():
        main(["run", str(plan_file), "--steps", "2"])
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith(f"step    1  loss {expected[0]:.6g}  ")
    assert lines[1].startswith(f"step    2  loss {expected[1]:.6g}  ")
    assert lines[2].startswith("step predicted ")
    assert lines[4].split()[:2] == ["gpu0", "cpu"]
    assert "gpu0, gpu1 run on the CPU" in err
    assert plan_file.with_name("run.trace.json").is_file()


def test_what_was_measured_is_shown_though_the_trace_cannot_be_written(plan_file, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", str(plan_file), "--steps", "1", "--backend", "single", "--trace", "/dev/full"])
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert "step predicted " in out
    assert "No space left on device" in err


def test_a_loss_that_is_no_number_is_not_passed_over(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FACTORY)
    save_plan(tmp_path / "bad.json", "mine.py:bad")
    main(["run", "bad.json", "--steps", "2", "--backend", "single", "--json"])
    out, err = capsys.readouterr()
    assert json.loads(out)["losses"] == [None, None]
    assert json.loads(out)["is_finite"] is False
    assert "warning: the loss is not finite" in err


def test_the_step_that_is_shown_is_not_the_first_and_no_longer_than_the_one_told():
    """Of two steps the first was shown: busy for 2.76 s in a step of 12 ms."""

    def record(seconds):
        return StepRecord(start_s=5.0, end_s=5.0 + seconds)

    for times in ((4.0, 1.0), (0.5, 1.0, 3.0), (9.0, 2.0, 4.0, 8.0, 6.0), (3.0,)):
        records = [record(seconds) for seconds in times]
        median_s = statistics.median(times[1:] or times)
        for shown in (records, records[-3:]):
            found = middle_step(shown, times)
            assert found is not records[0] or len(times) == 1
            assert found.step_s <= median_s
    slower_s = (1.0, 1.0, 1.0, 1.0, 3.0, 2.0)
    assert middle_step([record(3.0), record(2.0)], slower_s).step_s == 2.0


def test_another_model_is_refused(plan_file):
    graph = read_plan(plan_file).problem.graph
    assert build(graph).name == "mine.py:make"
    with pytest.raises(UsageError, match="another graph than the plan's: op ") as caught:
        build(graph, model="mine.py:other")
    assert "plan again" in caught.value.hint
    with pytest.raises(UsageError, match="another graph"):
        build(graph, model="mlp")


def test_a_graph_without_a_model_is_refused(plan_file):
    saved = read_plan(plan_file)
    for meta, message in (
        ({}, "was not captured op by op"),
        ({**saved.problem.graph.meta, "level": "module"}, "was not captured op by op"),
        ({**saved.problem.graph.meta, "model": "Net"}, "the plan's model 'Net' is not known here"),
    ):
        with pytest.raises(UsageError, match=message):
            build(replace(saved.problem.graph, meta=meta))


@pytest.mark.filterwarnings("ignore::hocket.capture.CaptureWarning")
def test_a_model_that_could_not_be_traced_is_refused_with_the_line_and_the_cause(plan_file):
    """Whoever named package.module:function was told to name one."""
    model, batch = load_model("mine.py:sparse")
    graph = capture(model, batch, name="mine.py:sparse")
    with pytest.raises(UsageError, match=r"mine\.py:\d+: cannot trace .*nonzero") as caught:
        build(graph)
    assert "keep the step independent of data values" in caught.value.hint
    assert "hocket.prepare(memory=)" in caught.value.hint
    assert "plan a model of the zoo" not in caught.value.hint


def test_a_function_is_called_with_what_it_knows(plan_file):
    """Its batch need not come first, and its dtype need not be one that the zoo has."""
    model, batch = load_model("mine.py:time_first")
    graph = capture(model, batch, name="mine.py:time_first")
    assert (graph.meta["batch"], graph.meta["dtype"]) == (7, "float64")
    assert build(graph).batch["x"].shape == (7, 2, 4)


@pytest.mark.parametrize(
    "meta", [{"batch": "six"}, {"seq": [1]}, {"dtype": 5}, {"optimizer": True}, {"device": 0}]
)
def test_what_a_graph_says_of_its_capture_is_not_trusted(plan_file, meta):
    graph = read_plan(plan_file).problem.graph
    (key,) = meta
    with pytest.raises(UsageError, match=f"says that its {key} was"):
        build(replace(graph, meta={**graph.meta, **meta}))


def test_a_wrong_name_for_the_model_gets_a_suggestion(plan_file):
    with pytest.raises(UsageError, match="unknown model 'gpt22'") as caught:
        build(read_plan(plan_file).problem.graph, model="gpt22")
    assert "gpt2" in caught.value.hint


def test_zoo_models_are_found_again_from_their_graphs():
    for name, options in {
        "lstm": {"batch": 2, "seq": 3},
        "gnmt-4": {"batch": 2, "seq": 2},
        "mlp": {"batch": 3, "dtype": "bfloat16"},
    }.items():
        model, batch = load_model(name, **options)
        found = build(capture(model, batch, name=name, optimizer="sgd"))
        for parameter, value in model.named_parameters():
            assert found.module.get_parameter(parameter).shape == value.shape


def test_backend_follows_what_the_machine_has(plan_file, monkeypatch):
    devices = read_plan(plan_file).problem.cluster.devices
    assert choose_backend("placement", "auto", devices) == ("gloo", ["cpu", "cpu"])
    assert choose_backend("placement", "auto", devices[1:]) == ("single", ["cpu"])
    with pytest.raises(UsageError, match="0 CPUs, this machine has 0 CUDA devices"):
        choose_backend("placement", "nccl", devices)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert choose_backend("placement", "auto", devices) == ("single", ["cuda:0", "cuda:1"])
    assert choose_backend("placement", "nccl", devices[1:]) == ("nccl", ["cuda:0"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert choose_backend("placement", "single", devices) == ("single", ["cuda:0", "cuda:0"])
    assert choose_backend("placement", "auto", devices)[0] == "gloo"
    with pytest.raises(UsageError, match="unknown backend 'glo'") as caught:
        choose_backend("placement", "glo", devices)
    assert "gloo" in caught.value.hint


def test_options_of_another_kind_of_plan_are_refused():
    RunOptions(steps=3, model="mlp").require_meaning("placement")
    with pytest.raises(UsageError, match="dtype has no meaning for a placement"):
        RunOptions(dtype="bfloat16").require_meaning("placement")
    with pytest.raises(UsageError, match="model has no meaning for a transformer plan"):
        RunOptions(model="mlp").require_meaning("transformer")


# ── interrupted and killed ───────────────────────────────────────────────────────────────────────


@pytest.fixture
def started(plan_file):
    """A run without end, when its ranks are at work; with their processes."""
    temporary = plan_file.parent / "tmp"
    temporary.mkdir()
    variables = {**os.environ, "TMPDIR": str(temporary)}
    with ForkedCommand("run", plan_file, "--steps", "1000000", env=variables) as run:
        lines = [run.stdout.readline() for _ in range(2)]
        if not lines[1].startswith("step "):
            run.kill()
            raise AssertionError(run.communicate()[1])
        children = psutil.Process(run.pid).children(recursive=True)
        ranks = [child for child in children if "hocket.runtime.run_rank" in child.cmdline()]
        reapers = [child for child in children if child not in ranks]
        assert (len(ranks), len(reapers)) == (2, 1)
        yield run, [*ranks, *reapers], temporary


def assert_gone(ranks, temporary):
    _, alive = psutil.wait_procs(ranks, timeout=300)
    assert alive == []
    left = [path for path in temporary.iterdir() if not path.name.startswith("torchinductor")]
    assert left == []


def test_ctrl_c_ends_with_130_and_leaves_nothing(started):
    run, ranks, temporary = started
    run.send_signal(signal.SIGINT)
    _, err = run.communicate()
    assert run.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert_gone(ranks, temporary)


def test_ranks_end_when_the_run_itself_is_killed(started):
    run, ranks, temporary = started
    os.kill(ranks[0].pid, signal.SIGSTOP)
    run.kill()
    run.communicate()
    assert_gone(ranks, temporary)


def test_a_killed_rank_ends_the_command_with_5(started):
    run, ranks, temporary = started
    ranks[1].kill()
    _, err = run.communicate()
    assert run.returncode == 5
    assert "rank 1 (gpu1) was killed by signal 9 (SIGKILL) while" in err
    assert "Traceback" not in err
    assert_gone(ranks, temporary)
