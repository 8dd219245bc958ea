"""``hocket parallel`` and what other commands do with its plans, in this process for speed."""

import json
import re

import pytest

from hocket.cli import main, parallel
from hocket.cli.root import root

if "parallel" not in root.commands:
    root.add_command(parallel.command)

KEYS = {
    "tensor", "pipeline", "data", "context", "expert", "chunks", "microbatch", "schedule",
    "recompute", "zero", "sequence_parallel", "step_s", "tokens_per_s", "mfu", "peak_bytes",
    "bubble", "feasible", "reason",
}  # fmt: skip


def _exit_code(arguments):
    try:
        main(arguments)
    except SystemExit as done:
        return done.code or 0
    return 0


@pytest.fixture
def hocket(capsys, monkeypatch):
    """Run a command; its exit code, standard output and error output."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments, expect=0):
        code = _exit_code([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert code == expect, f"{code}\n{out}\n{err}"
        assert "Traceback" not in err
        assert "unexpected" not in err
        return out, err

    return run


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    question = "parallel gpt-3.6b --on 4xa100-80g --batch 16 --json --fix"
    assert _exit_code([*question.split(), "pipeline=2,schedule=1f1b", "-o", str(path)]) == 0
    return path


def test_table_reason_and_files(hocket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, err = hocket(
        "parallel", "gpt-3.6b", "--on", "4xa100-80g", "--batch", 16, "--top", 5,
        "--report", "report.html",
    )  # fmt: skip
    assert out.count("✔") == 1
    assert "chosen because" in out
    assert "divisions" in out
    assert "wrote plan.json, report.html" in err
    assert json.loads((tmp_path / "plan.json").read_text())["schema"] == "hocket.parallel/1"
    page = (tmp_path / "report.html").read_text()
    assert "src=" not in page
    assert "url(" not in page
    assert "<script" not in page
    assert "Candidates" in page


def test_without_a_program_the_plan_is_one_that_megatron_runs(hocket, tmp_path):
    plan = tmp_path / "plan.json"
    asked = ("parallel", "gpt-7.5b", "--on", "2xdgx-a100-40g", "--batch", 64, "--fix", "pipeline=4")
    out, _ = hocket(*asked, "--json", "-o", plan)
    result = json.loads(out)
    assert {c["schedule"] for c in result["candidates"]} <= {"1f1b", "interleaved"}
    assert not any(c["hocket_run_only"] for c in result["candidates"])
    hocket("export", plan, "--to", "megatron", "-o", tmp_path)


def test_a_schedule_that_the_program_lacks_is_marked_or_refused(hocket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ("parallel", "gpt-3.6b", "--on", "4xa100-80g", "--batch", 16, "--schedule", "zb-v")
    out, _ = hocket(*asked)
    assert "zb-v x2*" in out
    assert "* hocket run only: megatron-core does not have this schedule" in out
    assert "zb-v x2 (hocket run only)" in out
    _, err = hocket(*asked, "--software", "megatron-core", expect=2)
    assert "megatron-core has no schedule zb-v" in err
    assert "it runs 1f1b, interleaved" in err


def test_eighty_columns_keep_what_decides(hocket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    out, _ = hocket("parallel", "gpt3-175b", "--on", "12xdgx-a100-80g", "--batch", 384)
    lines = out.splitlines()
    titles = lines[0].split()
    assert {"tensor", "pipe", "data", "micro", "schedule", "recompute", "ZeRO", "step"} < {*titles}
    assert max(map(len, lines)) <= 80
    chosen = next(line for line in lines if "✔" in line).split()
    tensor, pipe = chosen[1:3]
    why = " ".join(lines)
    assert f"tensor {tensor}, pipeline {pipe}, " in why
    assert why.index(f"tensor {tensor}, pipeline {pipe}, ") < why.index("chosen because")
    assert not re.search(r"\bt\d+ p\d+ d\d+", why)


def test_json_has_the_keys_and_the_chosen_first(hocket):
    out, _ = hocket("parallel", "gpt-3.6b", "--on", "4xa100-80g", "--batch", 16, "--json")
    result = json.loads(out)
    assert set(result["chosen"]) >= KEYS
    assert all(set(candidate) >= KEYS for candidate in result["candidates"])
    assert result["candidates"][0]["step_s"] == result["chosen"]["step_s"]
    assert result["chosen"]["feasible"]
    parts = result["chosen"]["breakdown"]
    assert sum(parts.values()) == pytest.approx(result["chosen"]["step_s"], rel=1e-6)
    assert result["written"] == []


def test_nothing_fits_is_exit_4_and_says_what_would_do(hocket):
    out, err = hocket(
        "parallel", "gpt-39b", "--on", "4xv100-16g", "--batch", 16, "--json", expect=4
    )
    result = json.loads(out)
    assert result["error"]["code"] == "no-feasible-plan"
    assert "pipeline rank" in result["error"]["message"]
    assert "hosts of 4" in result["error"]["message"]
    assert result["chosen"] is None
    assert not any(candidate["feasible"] for candidate in result["candidates"])
    assert "float16 is taken" in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["gpt-3.6b", "--on", "4xa100-80g"], 2, "--batch N is missing"),
        (["gpt-3.7b", "--on", "4xa100-80g", "--batch", "8"], 2, "did you mean"),
        (["gpt-3.6b", "--on", "4xa100", "--batch", "8"], 2, "a100-40g"),
        (["gpt-3.6b", "--on", "4xa100-80g", "--batch", "8", "--schedule", "1f1"], 2, "'1f1b'"),
        (["gpt-3.6b", "--on", "4xa100-80g", "--batch", "8", "--fix", "tensr=2"], 2, "'tensor'"),
        (["gpt-3.6b", "--on", "4xa100-80g", "--batch", "8", "--software", "megatrn"], 2, "unknown"),
        (["gpt-3.6b", "--on", "4xa100-80g", "--batch", "8", "--fix", "tensor=7"], 4, "no division"),
        (["gpt-3.6b", "--on", "4xa100-80g", "--batch", "8", "-o", "no/such/x.json"], 2, "folder"),
        (["gpt-3.6b", "--on", "4xa100-80g", "--batch", "8", "--fix", "zero=9"], 2, "zero is 9"),
        (["--predict", "missing.toml"], 3, "no such file"),
        (["gpt-3.6b", "--predict", "x.toml"], 2, "leave out MODEL"),
        (["--predict", "x.toml", "--seq", "9", "--fix", "tensor=1"], 2, "leave out --seq, --fix"),
        (["--predict", "x.toml", "-o", "no/such/x.json"], 2, "folder"),
    ],
)  # fmt: skip
def test_wrong_questions_are_answered_in_a_sentence(
    arguments, code, said, hocket, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    out, err = hocket("parallel", *arguments, expect=code)
    assert said in out + err


# ── one configuration ────────────────────────────────────────────────────────────────────────────

OLD = """\
[kinds.old]
memory = "16GiB"
memory_bandwidth = "100GB/s"
peak = { float32 = "1TFLOP/s" }
host_link = { bandwidth = "12GB/s", latency = "5us" }
[[devices]]
kind = "old"
count = 2
"""

CONFIG = """\
model = "gpt-18b"
on = "4xdgx-a100-80g"
batch = 64
software = "megatron-2021"
[division]
tensor = 8
pipeline = 2
microbatch = 2
recompute = "full"
"""


def _config(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_predict_one_configuration(hocket, tmp_path):
    out, _ = hocket("parallel", "--predict", _config(tmp_path, CONFIG), "--json")
    result = json.loads(out)
    assert set(result) >= KEYS
    assert (result["tensor"], result["pipeline"], result["data"]) == (8, 2, 2)
    assert sum(result["breakdown"].values()) == pytest.approx(result["step_s"], rel=1e-6)
    assert result["breakdown"]["bubble_s"] == pytest.approx(result["bubble"] * result["step_s"])
    assert result["reason"] == "it fits"
    assert result["step_s"] == pytest.approx(result["estimate_s"], rel=0.1)


def test_predict_with_own_model_and_uneven_layers(hocket, tmp_path):
    text = """\
on = "4xa100-80g"
batch = 8
[model]
hidden = 1024
layers = 10
heads = 16
vocabulary = 32000
sequence = 1024
[division]
pipeline = 4
layers = [2, 3, 3, 2]
schedule = "1f1b"
"""
    out, _ = hocket("parallel", "--predict", _config(tmp_path, text), "--json")
    assert json.loads(out)["layers"] == [2, 3, 3, 2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("tensor = 8", "tensr = 8"), "did you mean 'tensor'?"),
        (("tensor = 8", "tensor = 7"), "cannot be divided by tensor 7"),
        (("tensor = 8", "tensor = 'x'"), "division.tensor"),
        (("pipeline = 2", "pipeline = 99"), "needed"),
        (("microbatch = 2", "microbatch = 3"), "microbatches of 3"),
        (('"full"', '"ful"'), "did you mean 'full'?"),
        (("batch = 64", "batch = 0"), "batch is 0"),
        (("batch = 64", "batch = 2147483640"), "actions"),
        (("batch = 64", "batch = 64\ndtype = 'float7'"), "dtype"),
        (("[division]", "[divisions]"), "did you mean 'division'?"),
        (("[division]", "division = 3\n[x]"), "unknown key"),
        (("batch = 64", "batch = "), "is not TOML"),
        (('"gpt-18b"', "3"), "model is 3"),
    ],
)
def test_bad_configurations_are_refused_with_their_place(change, said, hocket, tmp_path):
    path = _config(tmp_path, CONFIG.replace(*change))
    out, err = hocket("parallel", "--predict", path, "--json", expect=3)
    assert said in out
    assert "config.toml" in err


def test_predict_of_what_does_not_fit_is_told_not_refused(hocket, tmp_path):
    text = CONFIG.replace('"gpt-18b"', '"gpt-145b"').replace(
        "pipeline = 2", "pipeline = 2\ndata = 1"
    )
    out, _ = hocket("parallel", "--predict", _config(tmp_path, text), "--json")
    result = json.loads(out)
    assert not result["feasible"]
    assert result["reason"].startswith("lacks")
    plan = tmp_path / "plan.json"
    said, _ = hocket(
        "parallel", "--predict", tmp_path / "config.toml", "--json", "-o", plan, expect=4
    )
    assert "hosts" not in json.loads(said)["error"]["message"]
    assert not plan.exists()


def test_predict_takes_the_stated_arithmetic(hocket, tmp_path):
    text = CONFIG.replace("4xdgx-a100-80g", "4xdgx-h100").replace('"megatron-2021"', '"torch"')
    step_s = []
    for stated in (text, "dtype = 'float8'\n" + text):
        out, _ = hocket("parallel", "--predict", _config(tmp_path, stated), "--json")
        step_s.append(json.loads(out)["step_s"])
    assert step_s[1] < 0.95 * step_s[0]


def test_predict_finds_a_model_file_beside_the_configuration(hocket, tmp_path):
    path = _config(tmp_path, CONFIG.replace('"gpt-18b"', '"mine.toml"'))
    (tmp_path / "mine.toml").write_text(
        "hidden = 512\nlayers = 4\nheads = 8\nvocabulary = 1000\nsequence = 128\n"
    )
    assert json.loads(hocket("parallel", "--predict", path, "--json")[0])["feasible"]


def test_predict_fills_clusters_of_unequal_devices(hocket, tmp_path):
    text = """\
model = "gpt-3.6b"
on = "1xdgx-a100-80g+1xdgx-h100"
batch = 64
[division]
pipeline = 2
tensor = 2
"""
    out, _ = hocket("parallel", "--predict", _config(tmp_path, text), "--json")
    result = json.loads(out)
    assert result["data"] == 4
    assert len(result["kinds"]) == 2


def test_plan_for_devices_without_16_bit_arithmetic_can_be_read(hocket, tmp_path):
    model, cluster, plan = (tmp_path / name for name in ("tiny.toml", "old.toml", "plan.json"))
    model.write_text("hidden = 64\nlayers = 4\nheads = 4\nvocabulary = 1000\nsequence = 64\n")
    cluster.write_text(OLD)
    hocket("parallel", model, "--on", cluster, "--batch", 4, "--json", "-o", plan)
    assert json.loads(plan.read_text())["dtype"] == "float32"
    assert "legal" in hocket("verify", plan)[0]
    for target in ("megatron", "deepspeed"):
        files = hocket("export", plan, "--to", target)[0]
        assert "bf16" not in files
        assert "fp16" not in files


# ── plans in other commands ──────────────────────────────────────────────────────────────────────


def test_show_simulate_explain_verify_know_parallel_plans(hocket, plan_file, tmp_path):
    out, _ = hocket("show", plan_file)
    assert "gpt-3.6b on 4xa100-80g" in out
    assert "pipeline 2" in out
    shown = json.loads(hocket("show", plan_file, "--json")[0])
    simulated = json.loads(hocket("simulate", plan_file, "--json")[0])
    assert shown["step_s"] == simulated["step_s"] == simulated["predicted_step_s"]
    assert simulated["feasible"]
    assert len(shown["ranks"]) == 2
    assert "the step's time goes into" in hocket("explain", plan_file)[0]
    assert json.loads(hocket("explain", plan_file, "--json")[0])["why"]
    assert "legal" in hocket("verify", plan_file)[0]
    report = tmp_path / "report.html"
    hocket("show", plan_file, "--report", report)
    assert "<svg" in report.read_text()


def test_verify_finds_a_schedule_that_waits_for_itself(hocket, plan_file, tmp_path):
    data = json.loads(plan_file.read_text())
    words = data["schedule"]["actions"][1].split()
    data["schedule"]["actions"][1] = " ".join(reversed(words))
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(data))
    out, _ = hocket("verify", path, "--json", expect=6)
    assert "can never start" in json.loads(out)["error"]["message"]


def test_verify_finds_memory_that_the_file_hides(hocket, plan_file, tmp_path):
    data = json.loads(plan_file.read_text())
    data["costs"]["state_bytes"][0] = 10**12
    path = tmp_path / "large.json"
    path.write_text(json.dumps(data))
    out, _ = hocket("verify", path, "--json", expect=6)
    assert "pipeline rank 0 lacks" in json.loads(out)["error"]["message"]


def test_graph_option_has_no_meaning_for_parallel_plans(hocket, plan_file):
    for name in ("show", "simulate", "explain", "verify"):
        assert "no graph" in hocket(name, plan_file, "--graph", "x.json", expect=2)[1]


def test_schema_of_parallel_plans_is_printed(hocket):
    assert json.loads(hocket("schema", "parallel")[0])["title"] == "ParallelPlanFile"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_table_keeps_its_numbers_at_any_width(width, hocket, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(width))
    fixed = ["--fix", "tensor=1,schedule=1f1b,recompute=none"]
    out, _ = hocket("parallel", "gpt-1.7b", "--on", "2xa100-80g", "--batch", 8, *fixed)
    assert "of 80.0 GiB" in out
    assert "longer" in out
    assert ("tokens/s" in out) == (width == 200)


def test_a_count_of_a_kind_says_what_joins_it(hocket):
    _, err = hocket("parallel", "gpt2", "--on", "8xh100", "--batch", 16, "--json")
    assert "8xh100-80g is 8 devices joined by PCIe; dgx-h100" in err


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("presets", {"rtx4090", "dgx-h100"}),
        ("models", {"gpt2", "llama3-8b", "resnet50"}),
        ("planners", {"auto", "m-etf"}),
        ("policies", {"las", "fifo"}),
        ("programs", {"megatron-core", "torch"}),
    ],
)
def test_list_names_what_other_commands_take(what, names, hocket):
    listed = json.loads(hocket("list", what, "--json")[0])[what]
    assert names < {entry["name"] for entry in listed}
    assert all(entry["is"] for entry in listed)
    out, _ = hocket("list", what)
    assert all(name in out for name in names)


def test_show_writes_the_trace_of_a_parallel_plan(hocket, plan_file, tmp_path):
    trace = tmp_path / "trace.json"
    out, _ = hocket("show", plan_file, "--json", "--trace", trace)
    written = json.loads(trace.read_text())
    assert written["otherData"]["step_s"] == pytest.approx(json.loads(out)["step_s"])
    slices = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert {event["name"][1:2] for event in slices if event["name"][0].isdigit()} == {"F", "B"}
    named = [e["args"]["name"] for e in written["traceEvents"] if e["name"] == "process_name"]
    assert [name.split(" (")[0] for name in named if name.startswith("rank")] == [
        "rank 0",
        "rank 1",
    ]
