"""Whole commands as a user types them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from cli.terminal import hocket

from hocket.base.errors import UsageError
from hocket.cli import plan
from hocket.cli.root import root
from hocket.cli.sources import announce_compilation
from hocket.graph import files as graph_files
from hocket.kernels import progress


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("commands")
    hocket("generate", "transformer", "--ops", 600, "--seed", 1, "-o", path / "g.json.gz")
    (path / "two.toml").write_text(hocket_detect_like())
    return path


def hocket_detect_like() -> str:
    return """\
name = "two"

[kinds.small]
memory = "24GiB"
memory_bandwidth = "448GB/s"
launch = "5us"
peak = { float32 = "10TFLOP/s" }

[[devices]]
kind = "small"
count = 2
name = "gpu"
host = "host0"

[[links]]
ends = ["gpu0", "host0"]
bandwidth = "12GB/s"
latency = "10us"

[[links]]
ends = ["gpu1", "host0"]
bandwidth = "12GB/s"
latency = "10us"
"""


def test_plan_prints_one_object_with_candidates_and_the_chosen_one(folder):
    done = hocket("plan", "g.json.gz", "--on", "4xv100-16g", "--json", cwd=folder)
    result = json.loads(done.stdout)
    names = [c["planner"] for c in result["candidates"]]
    assert names[-1] == "auto"
    assert {"one-device", "device-map-auto", "m-topo", "m-etf", "m-sct", "pardnn"} < set(names)
    for candidate in result["candidates"]:
        assert set(candidate) >= {"planner", "feasible", "step_s", "peak_bytes", "reason"}
        assert list(candidate["peak_bytes"]) in ([], ["gpu0", "gpu1", "gpu2", "gpu3"])
    steps = {c["planner"]: c["step_s"] for c in result["candidates"] if c["feasible"]}
    assert result["chosen"] == min(steps, key=steps.get)
    assert result["step_s"] == min(steps.values())
    assert 0 < result["lower_bound_s"] <= result["step_s"]
    assert result["gap"] == pytest.approx(1 - result["lower_bound_s"] / result["step_s"])
    assert len(result["placement"]) == result["graph"]["ops"]
    assert set(result["placement"].values()) <= {"gpu0", "gpu1", "gpu2", "gpu3"}
    assert result["cut_bytes"] >= 0
    assert not (folder / "plan.json").exists()


def test_plan_for_throughput_reports_the_load_of_the_busiest_device(folder):
    options = ["--on", "two.toml", "--objective", "throughput", "--contiguous", "--json"]
    result = json.loads(hocket("plan", "g.json.gz", *options, cwd=folder).stdout)
    loads = [c["max_load"] for c in result["candidates"] if c["feasible"]]
    assert result["max_load"] == min(loads)
    assert result["lower_bound_s"] <= result["max_load"] <= result["step_s"]


def test_plan_with_one_planner_is_repeated_exactly_by_simulate(folder):
    options = ["--planner", "m-topo", "--on", "two.toml", "-o", "m.json", "--json"]
    planned = json.loads(hocket("plan", "g.json.gz", *options, cwd=folder).stdout)
    assert planned["planner"] == planned["chosen"] == "m-topo"
    assert planned["plan_seconds"] > 0
    assert sorted(planned["written"]) == ["m.json", "m.report.html", "m.trace.json"]
    simulated = json.loads(hocket("simulate", "m.json", "--json", cwd=folder).stdout)
    assert simulated["step_s"] == planned["step_s"]
    assert simulated["peak_bytes"] == planned["peak_bytes"]
    assert simulated["feasible"] is True


def test_plan_for_a_person_shows_the_table_and_what_to_do_next(folder):
    done = hocket("plan", "g.json.gz", "--on", "two.toml", cwd=folder)
    assert "✔" in done.stdout
    assert "chosen because" in done.stdout
    assert "wrote plan.json, report.html, trace.json" in done.stderr
    for name in ("plan.json", "report.html", "trace.json"):
        assert (folder / name).stat().st_size > 1000
    shown = hocket("show", "plan.json", cwd=folder)
    assert "gpu0" in shown.stdout
    explained = hocket("explain", "plan.json", cwd=folder)
    assert "limited by" in explained.stdout
    path = json.loads(hocket("explain", "plan.json", "--json", cwd=folder).stdout)["critical_path"]
    assert path[0]["reason"] == "start"
    placement = json.loads(hocket("show", "plan.json", "--json", cwd=folder).stdout)["placement"]
    assert set(placement.values()) <= {"gpu0", "gpu1"}
    assert json.loads(hocket("verify", "plan.json", "--json", cwd=folder).stdout)["ok"] is True


def test_plan_tells_what_other_devices_would_bring(tmp_path):
    hocket("generate", "chain", "--ops", 12, "-o", "g.json.gz", cwd=tmp_path)
    asked = ("plan", "g.json.gz", "--on", "2xt4", "--planner", "layer-blocks",
             "--what-if", "2xh200")  # fmt: skip
    result = json.loads(hocket(*asked, "--objective", "step", "--json", cwd=tmp_path).stdout)
    (other,) = result["what_if"]
    assert other["cluster"] == "2xh200"
    assert other["how"] == "layer-blocks"  # a planner that was named is asked about both
    assert other["step_s"] < result["step_s"]
    done = hocket(*asked, cwd=tmp_path)
    assert "2xh200" in done.stdout
    assert "wrote plan.json" in done.stderr


def test_plan_that_cannot_fit_ends_with_4_and_says_what_is_missing(folder, tmp_path):
    text = (folder / "two.toml").read_text().replace("24GiB", "1MiB")
    (tmp_path / "tiny.toml").write_text(text)
    done = hocket("plan", folder / "g.json.gz", "--on", tmp_path / "tiny.toml", "--json", expect=4)
    result = json.loads(done.stdout)
    assert result["error"]["code"] == "no-feasible-plan"
    assert "the largest device, gpu0, has 1.0 MiB" in result["error"]["message"]
    assert result["chosen"] is None
    assert all(not candidate["feasible"] for candidate in result["candidates"])


@pytest.mark.parametrize(
    ("arguments", "code", "needle"),
    [
        (["plan", "g.json.gz", "--on", "4xv100-16gg"], 2, "did you mean"),
        (["plan", "g.json.gz", "--on", "two.toml", "--planner", "mtopo"], 2, "m-topo"),
        (["plan", "g.json.gz", "--on", "1xt4", "--what-if", "+1xl44"], 2, "did you mean"),
        (["plan", "missing.json", "--on", "two.toml"], 3, "missing.json"),
        (["plan", "g.json.gz", "--on", "missing.toml"], 3, "missing.toml"),
        (["plan", "two.toml", "--on", "two.toml"], 3, "two.toml"),
        (["simulate", "g.json.gz"], 3, "not a hocket.plan/3 file"),
        (["generate", "chian", "-o", "x.json"], 2, "did you mean 'chain'"),
        (["plam"], 2, "did you mean 'plan'"),
        (["list"], 2, "Choose from: presets, models, planners"),
        (["plan", "never.py:run", "--on", "2xt44"], 2, "did you mean"),
        (["waves", "never.py:run", "--on", "2xt44"], 2, "did you mean"),
        (["plan", "--wat"], 2, "--wat"),
        (["generate", "chain", "--ops", "-3", "-o", "x.json"], 2, "--ops"),
    ],
)
def test_wrong_input_gets_one_sentence_and_a_documented_code(folder, arguments, code, needle):
    done = hocket(*arguments, cwd=folder, expect=code)
    assert needle in done.stderr
    assert done.stdout == ""
    as_json = hocket(*arguments, "--json", cwd=folder, expect=code)
    error = json.loads(as_json.stdout)["error"]
    assert set(error) == {"code", "message", "hint", "where"}
    assert error["message"]


def test_verify_finds_a_tampered_plan(folder, tmp_path):
    hocket("plan", folder / "g.json.gz", "--on", folder / "two.toml", "--planner", "layer-blocks",
           "-o", tmp_path / "plan.json", "--json")  # fmt: skip
    data = json.loads((tmp_path / "plan.json").read_text())
    placement = data["sections"]["placement"]
    device_of = placement["device_of"]
    placement["device_of"] = [1 - device for device in device_of[:-1]] + device_of[-1:]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    done = hocket("verify", tmp_path / "plan.json", "--json", expect=6)
    result = json.loads(done.stdout)
    assert result["error"]["code"] == "check-failed"
    assert result["violations"]


def test_missing_torch_is_told_in_one_sentence(folder):
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from hocket.cli import main\n"
        "main(['capture', 'gpt2', '-o', 'x.json'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=folder, check=False
    )
    assert done.returncode == 2
    assert "pip install" in done.stderr
    assert "torch" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "x.json").exists()


def test_a_first_plan_tells_how_many_kernels_are_left_at_most(folder, monkeypatch, capsys):
    told = []

    def announce(about=1):
        told.append(about)
        raise UsageError("enough")

    monkeypatch.setattr(plan, "announce_compilation", announce)
    for planner in (["--planner", "auto"], [], ["--planner", "m-topo"]):
        hocket("plan", "g.json.gz", "--on", "2xt4", *planner, "--json", cwd=folder, expect=2)
    assert told == [plan.NUM_KERNELS, plan.NUM_KERNELS, 1]
    announce_compilation(7)
    try:
        for number in range(7):
            progress.compiling(str(number))
    finally:
        progress.tell_before_compiling(None)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "compiling up to 7 of this command's kernels for this CPU, once",
        "compiled 5 kernels, up to 2 are left",
    ]


def test_doctor_reports_versions_and_a_working_simulator():
    result = json.loads(hocket("doctor", "--json").stdout)
    assert result["packages"]["numpy"]
    assert result["checks"]["simulator"] == "ok"
    assert result["checks"]["devices"].startswith("Cluster(")
    assert result["extras"]["torch"]["installed"]
    assert result["extras"]["torch"]["packages"]["torch"]


def test_doctor_says_what_a_missing_extra_would_add():
    script = (
        "import hocket.cli.doctor as d\n"
        "d._CHECKS.clear()\n"
        "d._EXTRAS['ray'] = ('fleet jobs on a Ray cluster', ('no-such-package',))\n"
        "from hocket.cli import main\n"
        "main(['doctor'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "pip install 'hocket[ray]' adds: fleet jobs on a Ray cluster" in done.stdout


def test_doctor_fails_where_a_part_does_not_work():
    script = (
        "import hocket.planners.compare as c\n"
        "def broken(*_): raise RuntimeError('boom')\n"
        "c.compare = broken\n"
        "from hocket.cli import main\n"
        "main(['doctor', '--json'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 6
    assert "boom" in json.loads(done.stdout)["checks"]["simulator"]


def test_options_of_models_are_refused_for_graph_files(folder):
    done = hocket("plan", "g.json.gz", "--on", "2xt4", "--batch", 999, cwd=folder, expect=2)
    assert "--batch has no effect on the graph file" in done.stderr


def test_output_in_a_missing_folder_is_refused_before_any_work(folder):
    for command in (
        ["plan", "g.json.gz", "--on", "2xt4", "-o", "missing/plan.json"],
        ["capture", "gpt2", "-o", "missing/g.json"],
    ):
        assert "there is no folder" in hocket(*command, cwd=folder, expect=2).stderr


def test_output_in_a_folder_that_is_read_only_is_refused_before_any_work(folder, monkeypatch):
    """By what the system says of it: root may write into folders whose mode forbids it."""
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr(graph_files, "read_graph", None)
    refused = hocket("plan", "g.json.gz", "--on", "2xt4", "-o", "here.json", cwd=folder, expect=2)
    assert "nothing can be written into its folder" in refused.stderr
    hocket("detect", "-o", "/dev/null", cwd=folder)


def test_output_that_can_be_no_file_is_refused_before_any_work(folder):
    plan, fit = ["plan", "g.json.gz", "--on", "2xt4"], ["fit", "g.json.gz", "--on", "1xt4"]
    for command in (plan, [*fit, "--memory", "1GiB"]):
        for output, said in ((".", "is a folder"), ("", "is a folder"), ("a" * 300, "too long")):
            refused = hocket(*command, "-o", output, cwd=folder, expect=2)
            assert said in refused.stderr


def test_full_standard_output_is_one_sentence(folder):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hocket", "schema", "plan"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "cannot write the result" in done.stderr
    assert "Traceback" not in done.stderr


def test_reader_of_the_output_may_go_away():
    command = f"{sys.executable} -m hocket schema plan | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["{", "0"]
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", [["schema", "plan"], ["--help"], ["doctor"]])
def test_reader_of_the_output_may_be_gone_before_there_is_any(arguments):
    # The doctor writes line by line; what it would try takes long and is not asked for here.
    script = (
        f"import hocket.cli.doctor\nhocket.cli.doctor._CHECKS.clear()\nhocket.cli.main({arguments})"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, text=True,
        check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_interrupt_ends_with_130_and_an_error_object():
    script = (
        "import hocket.graph.generators as g\n"
        "def stopped(*_): raise KeyboardInterrupt\n"
        "g.generate = stopped\n"
        "from hocket.cli import main\n"
        "main(['generate', 'chain', '-o', 'never.json', '--json'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 130
    assert json.loads(done.stdout)["error"]["code"] == "interrupted"


def test_detect_writes_a_file_that_plan_accepts(folder, tmp_path):
    hocket("detect", "-o", tmp_path / "here.toml")
    done = hocket("plan", folder / "g.json.gz", "--on", tmp_path / "here.toml", "--json")
    assert json.loads(done.stdout)["cluster"]["name"] == "this-machine"


def test_schema_is_json_schema():
    schema = json.loads(hocket("schema", "plan").stdout)
    assert schema["properties"]["schema"]["const"] == "hocket.plan/3"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_names_the_program(shell):
    assert "hocket" in hocket("completion", shell).stdout


def test_a_model_file_without_its_function_is_refused(tmp_path):
    (tmp_path / "net.py").write_text("import torch\n\ndef tiny(batch=2):\n    ...\n")
    said = hocket("capture", "net.py", "-o", "g.json.gz", cwd=tmp_path, expect=2)
    assert "'net.py' names no function" in said.stderr
    assert "net.py:FUNCTION" in said.stderr
    said = hocket("plan", "nope.py:conv", "--on", "2xt4", cwd=tmp_path, expect=2)
    assert "there is no file 'nope.py'" in said.stderr


@pytest.mark.parametrize("words", [(), ("fleet",)])
def test_a_group_alone_prints_its_help_as_it_is(words):
    assert hocket(*words, expect=2).stderr == hocket(*words, "--help").stdout


def test_list_tells_whole_sentences():
    told = json.loads(hocket("list", "policies", "--json").stdout)
    assert "per device of the gang." in str(told)


def test_every_command_takes_json_and_explains_itself():
    helps = dict(explained())
    assert len(helps) >= 30
    assert [words for words, text in helps.items() if "--json" not in text] == []


def explained(*words: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every command below a group, with its help."""
    command, context = root, click.Context(root)
    for word in words:
        command = command.get_command(context, word)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from explained(*words, name)
    else:
        yield words, hocket(*words, "--help").stdout


def test_every_command_is_on_the_first_screen_uncut():
    first_screen = hocket("--help").stdout
    assert [name for name in root.list_commands(None) if name not in first_screen] == []
    assert "..." not in first_screen.partition("Plan:")[2]


def test_a_loss_of_output_and_target_is_planned_and_run(tmp_path):
    (tmp_path / "pairs.py").write_text(
        "import torch\n"
        "def build(batch=8):\n"
        "    return torch.nn.Linear(6, 3), (torch.randn(batch, 6), torch.randint(0, 3, (batch,)))\n"
        "def loss(output, target):\n"
        "    return torch.nn.functional.cross_entropy(output, target, label_smoothing=0.1)\n"
    )
    plan = ("plan", "pairs.py:build", "--on", "1xt4")
    missing = hocket(*plan, cwd=tmp_path, expect=2)
    assert "--loss FILE.py:FUNCTION" in missing.stderr
    for loss in ("cross-entropy", "pairs.py:loss"):
        hocket(*plan, "--loss", loss, "--amp", "bf16", cwd=tmp_path)
        ran = hocket("run", "plan.json", "--steps", 2, "--json", cwd=tmp_path)
        losses = json.loads(ran.stdout)["losses"]
        assert 0.5 < losses[1] < losses[0] < 2.5
