"""Parallel plans of a transformer's shape as a user runs them, also when a rank dies."""

import contextlib
import json
import os
import re
import signal
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from export.test_torch_script import plain_losses
from forked_worker_group import forked_worker_groups
from runtime.parallel_plans import GPT, LLAMA, divided, plan_of

from hocket.base.errors import RunError, UsageError
from hocket.cli import main
from hocket.hardware import detect
from hocket.hardware.shorthand import cluster_from_text
from hocket.plan.files import write_plan
from hocket.runtime import numerics_check, run_limits
from hocket.runtime import run as run_module
from hocket.runtime.numerics_check import Agreement
from hocket.runtime.ranks import lost_another
from hocket.runtime.run import choose_backend, run_plan
from hocket.runtime.run_options import RunCallbacks, RunOptions
from hocket.runtime.transformer_model import built_in_model
from hocket.simulate import simulate
from hocket.simulate.pipeline import action_busy_s

FOREVER = 10**6


def small_plan():
    return plan_of(*divided(LLAMA, "zb-h1", 2, microbatches=3, layers=(1, 2)))


def test_run_prints_losses_of_one_device_and_what_was_predicted(tmp_path, capsys, monkeypatch):
    plan = small_plan()
    right = Agreement(loss_error=0.0, gradient_error=2e-9, worst="head.logits.weight")
    # The check itself is tested with many configurations.
    monkeypatch.setattr(run_module, "check_parallel", lambda plan: right)
    path = tmp_path / "plan.json"
    write_plan(path, plan.problem, plan.plan)
    with forked_worker_groups():
        main(["run", str(path), "--steps", "2", "--seed", "3", "--json"])
    out, err = capsys.readouterr()
    result = json.loads(out)
    expected = plain_losses(plan.model, plan.config.global_batch, seed=3)
    assert result["losses"] == pytest.approx(expected, abs=1e-5)
    assert (result["backend"], result["dtype"]) == ("gloo", "float32")
    assert result["check"] == {"is_right": True, "loss_error": 0.0, "gradient_error": 2e-9}
    assert result["step_s"]["predicted"] == plan.step_s
    assert result["step_s"]["measured"] > 0
    assert [rank["devices"] for rank in result["pipeline_ranks"]] == [["gpu0"], ["gpu1"]]
    predicted_s = action_busy_s(simulate(plan.problem, plan.plan))
    for rank, busy_s in zip(result["pipeline_ranks"], predicted_s, strict=True):
        assert rank["busy_s"]["predicted"] == pytest.approx(busy_s)
    assert err.count("loss") == 2
    assert "run on the CPU here" in err


def run_and_hurt(signal_number):
    """Run without end and send a signal to rank 1 after the second step."""
    plan, pids, sent_s = small_plan(), [], []

    def hurt(number, record):
        if number == 2:
            os.kill(pids[1], signal_number)
            sent_s.append(time.monotonic())

    options = RunOptions(steps=FOREVER, checks=False)
    with pytest.raises(RunError) as caught:
        run_plan(
            plan.problem, plan.plan, options, watch=RunCallbacks(on_start=pids.extend, on_step=hurt)
        )
    took_s = time.monotonic() - sent_s[0]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    return caught.value, took_s


@pytest.mark.parametrize(
    ("signal_number", "message"),
    [
        (signal.SIGKILL, r"rank 1 \(gpu1\) was killed by signal 9 \(SIGKILL\) while in step "),
        # Two seconds, and what a busy machine takes to look.
        (
            signal.SIGSTOP,
            r"rank 1 \(gpu1\) has stopped answering for ([2-9]|\d\d) s while in step ",
        ),
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
    monkeypatch.setattr(numerics_check, "differences", lambda saved: right)
    main(["run", str(path), "--check-only"])
    assert "(largest difference 2.0e-09)" in capsys.readouterr().out
    main(["run", str(path), "--check-only", "--json"])
    assert json.loads(capsys.readouterr().out)["check"]["is_right"]
    with pytest.raises(SystemExit):
        main(["run", str(tmp_path / "none.json"), "--check-only"])
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [["--model", "gpt2"], ["--trace", "t.json"],
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
    _, config, schedule = divided(large, "1f1b", 2)
    plan = plan_of(large, config, schedule)
    with pytest.raises(UsageError, match=r"training large here takes .* TiB") as caught:
        run_plan(plan.problem, plan.plan, RunOptions())
    assert "--check-only" in caught.value.hint
    wide = replace(config, data=64, global_batch=256)
    with pytest.raises(UsageError, match="takes 128 devices"):
        run_limits.require_memory_for_states(
            plan_of(large, wide, schedule, on="128xv100-16g"), torch.float32
        )


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


def test_parameters_are_counted_without_building_the_model():
    for shape in (GPT, LLAMA, replace(GPT, tied_embeddings=False, layers=7)):
        held = sum(parameter.numel() for parameter in built_in_model(shape).parameters())
        assert run_limits.num_parameters(shape) == held


def test_gpus_are_chosen_where_there_are_enough(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices = cluster_from_text("3xv100-16g").devices
    assert choose_backend("transformer", "auto", devices[:2]) == ("nccl", ["cuda:0", "cuda:1"])
    assert choose_backend("transformer", "auto", devices) == ("gloo", ["cpu"] * 3)
    assert choose_backend("transformer", "gloo", devices[:2])[0] == "gloo"
    with pytest.raises(UsageError, match="this machine has 2 CUDA devices"):
        choose_backend("transformer", "nccl", devices)
    with pytest.raises(UsageError, match="'single' does not run a transformer plan"):
        choose_backend("transformer", "single", devices)


def test_weights_follow_from_names_and_the_seed():
    first, same = (built_in_model(LLAMA, seed=5).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], same[name]) for name in first)
    other = built_in_model(LLAMA, seed=6).state_dict()
    assert not torch.equal(other["head.logits.weight"], first["head.logits.weight"])
    tied = built_in_model(GPT)
    assert tied.head.logits.weight is tied.embedding.tokens.weight


def test_only_the_loss_of_another_rank_is_no_failure_of_ones_own():
    lost = RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]")
    outer = RuntimeError("stage 1 failed to run forward")
    outer.__cause__ = lost
    assert lost_another(outer)
    assert not lost_another(RuntimeError("out of memory"))


def test_predicted_busy_time_counts_every_action():
    for name in ("1f1b", "zb-v", "interleaved"):
        plan = plan_of(*divided(GPT, name, 2, microbatches=4))
        costs, ranks = plan.costs, plan.schedule.device_of_stage
        stage_s = np.add(costs.forward_s, costs.input_gradient_s) + costs.weight_gradient_s
        busy_s = action_busy_s(simulate(plan.problem, plan.plan))
        assert busy_s == pytest.approx(4 * np.bincount(ranks, stage_s))
