"""Parallel plans as a user runs them, also when a rank dies."""

import contextlib
import json
import os
import re
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from forked_worker_group import forked_worker_groups
from runtime.parallel_plans import GPT, LLAMA, divided, plan_of

from hocket.base.errors import MissingExtraError, RunError, UsageError
from hocket.cli import main
from hocket.hardware import detect
from hocket.hardware.shorthand import cluster_from_text
from hocket.plan.files import write_plan
from hocket.processes.frames import Frame
from hocket.processes.heartbeat import Position
from hocket.runtime import connect
from hocket.runtime.executors import choose
from hocket.runtime.lost import lost_another
from hocket.runtime.options import RunOptions
from hocket.runtime.parallel import check, fits, pipeline
from hocket.runtime.parallel import rank as rank_module
from hocket.runtime.parallel.build import build_stage, whole_model
from hocket.runtime.parallel.check import Agreement, reference_run
from hocket.runtime.parallel.job import TrainingJob
from hocket.runtime.parallel.jobs import actions_of, make_job
from hocket.runtime.parallel.model import Slice
from hocket.runtime.parallel.spawn import _describer
from hocket.runtime.session import run_plan
from hocket.runtime.sessions.division import _gpu_dtype
from hocket.simulate import simulate
from hocket.simulate.pipeline import action_busy_s

FOREVER = 10**6


def small_plan():
    return plan_of(*divided(LLAMA, "zb-h1", 2, microbatches=3, layers=(1, 2)))


def test_run_prints_losses_of_one_device_and_what_was_predicted(tmp_path, capsys, monkeypatch):
    plan, checked = small_plan(), []
    right = Agreement(loss_error=0.0, gradient_error=2e-9, worst="head.logits.weight")
    # The check itself runs with those of many divisions, where it needs no processes of its own.
    monkeypatch.setattr(check, "check_jobs", lambda jobs: checked.extend(jobs) or [right])
    path = tmp_path / "plan.json"
    write_plan(path, plan.problem, plan.plan)
    with forked_worker_groups():
        main(["run", str(path), "--steps", "2", "--seed", "3", "--json"])
    out, err = capsys.readouterr()
    result = json.loads(out)
    expected = reference_run(make_job(plan.model, plan.division, plan.schedule, steps=2, seed=3))
    assert result["losses"] == pytest.approx(expected.losses, abs=1e-5)
    assert (result["backend"], result["dtype"]) == ("gloo", "float32")
    assert result["check"] == {"is_right": True, "loss_error": 0.0, "gradient_error": 2e-9}
    assert [job.actions for job in checked] == [actions_of(plan.schedule)]
    assert result["step_s"]["predicted"] == plan.step_s
    assert result["step_s"]["measured"] > 0
    assert [rank["devices"] for rank in result["pipeline_ranks"]] == [["gpu0"], ["gpu1"]]
    predicted_s = action_busy_s(simulate(plan.problem, plan.plan))
    for rank, busy_s in zip(result["pipeline_ranks"], predicted_s, strict=True):
        assert rank["busy_s"]["predicted"] == pytest.approx(busy_s)
        assert 0 < rank["busy_s"]["measured"] < max(step["seconds"] for step in result["steps"])
    assert err.count("loss") == 2
    assert "run on the processor here" in err


def run_and_hurt(signal_number):
    """Run without end and send a signal to rank 1 after the second step."""
    plan, pids, sent_s = small_plan(), [], []

    def hurt(number, record):
        if number == 2:
            os.kill(pids[1], signal_number)
            sent_s.append(time.monotonic())

    options = RunOptions(steps=FOREVER, checks=False)
    with pytest.raises(RunError) as caught:
        run_plan(plan.problem, plan.plan, options, on_start=pids.extend, on_step=hurt)
    took_s = time.monotonic() - sent_s[0]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    return caught.value, took_s


@pytest.mark.parametrize(
    ("signal_number", "message"),
    [
        (signal.SIGKILL, r"rank 1 \(gpu1\) was killed by signal 9 \(SIGKILL\) while at "),
        # Two seconds, and what a busy machine takes to look.
        (signal.SIGSTOP, r"rank 1 \(gpu1\) has stopped answering for ([2-9]|\d\d) s while at "),
    ],
    ids=["killed", "stopped"],
)
def test_a_rank_that_is_lost_is_named_and_all_is_gone(signal_number, message):
    # Only who has made a process sees that it is stopped.
    is_forked = signal_number != signal.SIGSTOP
    with forked_worker_groups() if is_forked else contextlib.nullcontext():
        error, took_s = run_and_hurt(signal_number)
    assert re.match(message, error.message), error.message
    assert error.exit_code == 5
    assert took_s < 60


def test_only_the_check_can_be_asked_for(tmp_path, capsys, monkeypatch):
    path = tmp_path / "plan.json"
    made = small_plan()
    write_plan(path, made.problem, made.plan)
    right = Agreement(loss_error=0.0, gradient_error=2e-9, worst="head.logits.weight")
    monkeypatch.setattr(check, "check_jobs", lambda jobs: [right])
    main(["run", str(path), "--check-only"])
    assert "(largest difference 2.0e-09)" in capsys.readouterr().out
    main(["run", str(path), "--check-only", "--json"])
    assert json.loads(capsys.readouterr().out)["check"]["is_right"]
    with pytest.raises(SystemExit):
        main(["run", str(tmp_path / "none.json"), "--check-only"])
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [["--model", "gpt2"], ["--slowdown", "gpu0=2"], ["--trace", "t.json"],
     ["--backend", "single"], ["--graph", "g.json"], ["--backend", "nccl"]],
)  # fmt: skip
def test_options_without_meaning_are_refused(options, tmp_path, capsys):
    if options == ["--backend", "nccl"] and torch.cuda.device_count() > 1:
        pytest.skip("this machine has GPUs")
    path = tmp_path / "plan.json"
    made = small_plan()
    write_plan(path, made.problem, made.plan)
    with pytest.raises(SystemExit) as caught:
        main(["run", str(path), *options])
    assert caught.value.code == 2
    assert "hint:" in capsys.readouterr().err


def test_what_has_no_room_on_this_machine_is_refused(monkeypatch):
    large = replace(LLAMA, name="large", hidden=16384, layers=126, mlp_width=53248)
    _, division, schedule = divided(large, "1f1b", 2)
    plan = plan_of(large, division, schedule)
    with pytest.raises(UsageError, match=r"training large here takes .* TiB") as caught:
        run_plan(plan.problem, plan.plan, RunOptions())
    assert "--check-only" in caught.value.hint
    wide = replace(division, data=64, global_batch=256)
    with pytest.raises(UsageError, match="takes 128 devices"):
        fits.require_memory(large, wide, torch.float32)


def test_memory_that_caches_files_can_be_taken(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal: 8000000 kB\nMemFree: 1000 kB\nMemAvailable: 6000000 kB\n"
    )
    assert detect.available_bytes(tmp_path) == 6_000_000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("4000000\n")
    assert detect.available_bytes(tmp_path) == 4_000_000


def test_state_follows_from_parameters_and_zero():
    held = sum(p.numel() for p in whole_model(GPT).parameters())
    assert fits.num_parameters(GPT) == held
    _, division, _ = divided(GPT, "1f1b", 1, data=4)
    sizes = [
        fits.state_bytes(GPT, replace(division, zero=zero), torch.float32) / (4 * held)
        for zero in range(4)
    ]
    assert sizes == [16, 10, 10, 4]


def test_gpus_are_chosen_where_there_are_enough(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices = cluster_from_text("3xv100-16g").devices
    assert choose("division", "auto", devices[:2]) == ("nccl", ["cuda:0", "cuda:1"])
    assert choose("division", "auto", devices) == ("gloo", ["cpu"] * 3)
    assert choose("division", "gloo", devices[:2])[0] == "gloo"
    with pytest.raises(UsageError, match="takes 3 devices, this machine has 2"):
        choose("division", "nccl", devices)
    with pytest.raises(UsageError, match="'single' does not carry out a division"):
        choose("division", "single", devices)


def test_a_pytorch_that_is_too_old_or_changed_is_told(monkeypatch):
    pipeline.require_pipelining((0, 1, 1, 0))
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    pipeline.require_pipelining((0, 1, 0, 1))
    with pytest.raises(MissingExtraError, match="two stages in a row on one device"):
        pipeline.require_pipelining((0, 1, 1, 0))
    monkeypatch.delattr(pipeline.schedules._Action, "from_str")
    with pytest.raises(MissingExtraError, match=r"has no .*_Action\.from_str"):
        pipeline.require_pipelining((0, 1))


def test_jobs_survive_as_json_and_positions_are_told_in_words():
    job = make_job(*divided(LLAMA, "zb-v", 2, layers=(1, 2, 2, 1)))
    assert TrainingJob.from_dict(json.loads(json.dumps(job.as_dict()))) == job
    describe = _describer(job, 1)
    assert describe(Position(0.0, 0, 0)) == "starting"
    assert describe(Position(1.0, 3, 0)) == "at forward of microbatch 0 on stage 1 in step 3"
    texts = {describe(Position(1.0, 1, n)).partition(" of microbatch")[0]
             for n in range(len(job.actions[1]))}  # fmt: skip
    assert "at the gradient of the weights" in texts


def test_every_part_draws_the_values_of_the_whole_model():
    whole = whole_model(LLAMA, seed=5).state_dict()
    part = Slice(first_layer=2, num_layers=2, has_embedding=False, has_head=True)
    drawn = build_stage(LLAMA, part, seed=5).state_dict()
    assert drawn.keys() == {n for n in whole if n.startswith(("layers.2", "layers.3", "head"))}
    assert all(torch.equal(drawn[name], whole[name]) for name in drawn)
    other = build_stage(LLAMA, part, seed=6).state_dict()
    assert not torch.equal(other["head.logits.weight"], whole["head.logits.weight"])
    tied = whole_model(GPT).state_dict()
    assert torch.equal(tied["embedding.tokens.weight"], tied["head.logits.weight"])


def test_only_the_loss_of_another_rank_is_no_failure_of_ones_own():
    lost = RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]")
    outer = RuntimeError("stage 1 failed to run forward")
    outer.__cause__ = lost
    assert lost_another(outer)
    assert not lost_another(RuntimeError("out of memory"))


def test_a_failed_stage_tells_why(monkeypatch):
    """PyTorch's own error names the stage and its arguments, its cause what went wrong."""

    def fail(*_):
        raise RuntimeError("[Stage 0] failed to run forward:\n") from MemoryError("out of memory")

    job = make_job(*divided(LLAMA, "1f1b", 1))
    header = {"threads": torch.get_num_threads(), "device": "cpu", "jobs": [job.as_dict()]}
    monkeypatch.setattr(connect, "join_group", lambda header, device: None)
    monkeypatch.setattr(rank_module, "_run_job", fail)
    with pytest.raises(MemoryError, match="out of memory"):
        rank_module.run(SimpleNamespace(receive=lambda: Frame(header, [])))


def test_arithmetic_on_gpus_is_the_planned_one_where_it_can_be():
    divided_model = divided(LLAMA, "1f1b", 2)
    dtypes = ("bfloat16", "float32", "float8")
    found = {dtype: _gpu_dtype(plan_of(*divided_model, dtype=dtype)) for dtype in dtypes}
    assert found == {"bfloat16": "bfloat16", "float32": "float32", "float8": "bfloat16"}


def test_predicted_busy_time_counts_every_action():
    for name in ("1f1b", "zb-v", "interleaved"):
        plan = plan_of(*divided(GPT, name, 2, microbatches=4))
        costs, ranks = plan.costs, plan.schedule.device_of_stage
        stage_s = np.add(costs.forward_s, costs.input_gradient_s) + costs.weight_gradient_s
        busy_s = action_busy_s(simulate(plan.problem, plan.plan))
        assert busy_s == pytest.approx(4 * np.bincount(ranks, stage_s))
