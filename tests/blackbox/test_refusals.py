"""Exit codes and what errors say: what is wrong, where, and what to do."""

from __future__ import annotations

import json
import re

import pytest
from blackbox.command import hocket

MLP = "blackbox.tiny_models:mlp"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("refusals")
    (path / "broken.json").write_text("{")
    (path / "other.json").write_text('{"schema": "something.else/1"}')
    (path / "trace.csv").write_text("name,job_type,arrival_s,gang,duration_s\none,x,0,1,10\n")
    (path / "wrong.csv").write_text("name,arrival_s\none,0\n")
    (path / "typo.toml").write_text('name = "a"\n[[device]]\nkind = "t4"\n')
    ended = hocket("plan", MLP, "--on", "2xt4", "-o", "plan.json", cwd=path)
    assert ended.code == 0, ended.stderr
    return path


REFUSED = (
    # Usage.
    ((), 2, "Usage"),
    (("plan",), 2, "MODEL_OR_GRAPH"),
    (("plan", MLP), 2, "--on"),
    (("plann", MLP), 2, "plan"),
    (("plan", "gpt3", "--on", "2xt4"), 2, "gpt3-175b"),
    (("plan", MLP, "--on", "2xt5"), 2, "t5"),
    (("plan", MLP, "--on", "2xt4", "--planner", "m-eft"), 2, "m-etf"),
    (("plan", MLP, "--on", "2xt4", "--must", "fit lots"), 2, "lots"),
    (("plan", "blackbox.tiny_models:nothing", "--on", "2xt4"), 2, "nothing"),
    (("fit", MLP, "--on", "1xt4", "--memory", "8 apples"), 2, "apples"),
    (("fit", MLP, "--on", "2xt4", "--memory", "1GiB"), 2, "one device"),
    (("parallel", "gpt-1.7b", "--on", "2xdgx-h100", "--batch", "0"), 2, "--batch"),
    (("parallel", "gpt-17b", "--on", "2xdgx-h100", "--batch", "8", "--json"), 2, "gpt-1.7b"),
    (("collective", "allreduc", "--on", "dgx1-v100"), 2, "allreduce"),
    (("collective", "allreduce", "--on", "dgx1-v100", "--gpus", "0,9"), 2, "9"),
    (("fleet", "simulate", "trace.csv", "--cluster", "v100"), 2, "v100"),
    (("fleet", "simulate", "trace.csv", "--cluster", "v100:2", "--policy", "la"), 2, "las"),
    # Bad input files.
    (("show", "absent.json"), 3, "absent.json"),
    (("show", "broken.json"), 3, "broken.json"),
    (("simulate", "other.json"), 3, "hocket.plan/"),
    (("plan", "broken.json", "--on", "2xt4"), 3, "broken.json"),
    (("plan", MLP, "--on", "typo.toml"), 3, "devices"),
    (("fleet", "simulate", "wrong.csv", "--cluster", "v100:2"), 3, "wrong.csv"),
    (("tables", "serve", "absent.toml", "--at", "tcp://*:0"), 3, "absent.toml"),
    (("loop", "explain", "nothing.py:f"), 3, "nothing.py"),
    # Infeasible.
    (("plan", MLP, "--on", "2xt4", "--must", "step 1ns"), 4, "step"),
    (("fit", MLP, "--on", "1xt4", "--memory", "10B"), 4, "10 B"),
    (("parallel", "gpt3-175b", "--on", "1xdgx-h100", "--batch", "8", "--json"), 4, "nothing fits"),
)  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "meaning"), REFUSED, ids=str)
def test_refusals_have_their_exit_code_and_name_what_is_wrong(folder, arguments, code, meaning):
    ended = hocket(*arguments, cwd=folder)
    assert ended.code == code, ended
    assert meaning in ended.stderr + ended.stdout
    assert "Traceback" not in ended.stderr


def test_refusals_of_files_and_plans_give_a_hint(folder):
    for arguments in (("show", "broken.json"), ("fit", MLP, "--on", "1xt4", "--memory", "10B")):
        assert "hint:" in hocket(*arguments, cwd=folder).stderr


def test_a_refusal_with_json_prints_an_object(folder):
    ended = hocket("plan", MLP, "--on", "2xt4", "--must", "step 1ns", "--json", cwd=folder)
    assert ended.code == 4
    assert isinstance(json.loads(ended.stdout), dict)


def test_a_plan_that_was_changed_by_hand_fails_its_check(folder):
    assert hocket("verify", "plan.json", cwd=folder).code == 0
    data = json.loads((folder / "plan.json").read_text())
    text = json.dumps(data).replace('"gpu0"', '"gpu7"')
    (folder / "changed.json").write_text(text)
    assert hocket("verify", "changed.json", cwd=folder).code in (3, 6)


@pytest.mark.parametrize("name", ["show", "explain", "simulate", "verify"])
def test_commands_that_read_a_plan_agree_on_it(folder, name):
    ended = hocket(name, "plan.json", "--json", cwd=folder)
    assert ended.code == 0, ended.stderr
    assert ended.data


def test_plans_have_a_report_without_network_requests_and_a_trace(folder):
    report = (folder / "report.html").read_text()
    assert not re.findall(r"(?:src|href)=.?https?:|@import|fetch\(", report)
    trace = json.loads((folder / "trace.json").read_text())
    assert trace["traceEvents"] if isinstance(trace, dict) else trace


def test_run_trains_by_the_plan(folder):
    ended = hocket("run", "plan.json", "--steps", 2, "--json", cwd=folder)
    assert ended.code == 0, ended.stderr
    assert len(ended.data["losses"]) == 2
