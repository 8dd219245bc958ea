"""``hocket parallel`` and what other commands do with its plans, in this process for speed."""

import json
import re

import pytest
from cli.terminal import PARALLEL_KEYS, exit_code

ANSWERED_BY_SIMULATION = "simulation of the captured ops"
MEGATRON = ("--software", "megatron-core")
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
SMALL = ("gpt-3.6b", "--on", "4xa100-80g", "--batch", "8")


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    question = "parallel gpt-3.6b --on 4xa100-80g --batch 16 --json --software megatron-core --fix"
    assert exit_code([*question.split(), "pipeline=2,schedule=1f1b", "-o", str(path)]) == 0
    return path


def test_table_reason_and_files(hocket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, err = hocket(
        "parallel", "gpt-3.6b", "--on", "4xa100-80g", "--batch", 16, "--top", 5, *MEGATRON,
    )  # fmt: skip
    assert out.count("✔") == 1
    assert "chosen because" in out
    assert "configs" in out
    assert "wrote plan.json, report.html" in err
    assert json.loads((tmp_path / "plan.json").read_text())["schema"] == "hocket.plan/3"
    page = (tmp_path / "report.html").read_text()
    assert "src=" not in page
    assert "url(" not in page
    assert "<script" not in page
    assert "Candidates" in page


def test_a_plan_for_megatron_is_one_that_megatron_runs(hocket, tmp_path):
    plan = tmp_path / "plan.json"
    asked = ("parallel", "gpt-7.5b", "--on", "2xdgx-a100-40g", "--batch", 64, "--fix", "pipeline=4")
    out, _ = hocket(*asked, *MEGATRON, "--json", "-o", plan)
    result = json.loads(out)
    assert result["answered_by"] == "closed form of megatron-core, pipelines simulated"
    assert {c["schedule"] for c in result["candidates"]} <= {"1f1b", "interleaved"}
    hocket("export", plan, "--to", "megatron", "-o", tmp_path)


def test_one_config_is_predicted_where_all_degrees_are_fixed(hocket):
    question = ("parallel", "gpt-18b", "--on", "4xdgx-a100-80g", "--batch", 64, "--json")
    fixed = "tensor=8,pipeline=2,microbatch=2,recompute=full,schedule=1f1b,zero=0"
    found = hocket(*question, "--software", "megatron-2021", "--fix", fixed)[0]
    result = json.loads(found)["chosen"]
    assert set(result) >= PARALLEL_KEYS
    assert (result["tensor"], result["pipeline"], result["data"]) == (8, 2, 2)
    assert sum(result["breakdown"].values()) == pytest.approx(result["step_s"], rel=1e-6)
    assert result["breakdown"]["bubble_s"] == pytest.approx(result["bubble"] * result["step_s"])
    assert result["step_s"] == pytest.approx(result["estimate_s"], rel=0.1)


def test_stated_arithmetic_is_taken(hocket):
    question = ("parallel", "gpt-18b", "--on", "4xdgx-h100", "--batch", 64, "--json")
    fixed = ("--software", "torch", "--fix", "tensor=8,pipeline=2,microbatch=2,recompute=full")
    step_s = [
        json.loads(hocket(*question, *fixed, "--dtype", dtype)[0])["chosen"]["step_s"]
        for dtype in ("bfloat16", "float8")
    ]
    assert step_s[1] < 0.95 * step_s[0]


def test_options_of_the_program_change_the_prediction(hocket):
    question = ("parallel", "llama3-8b", "--on", "8xh100-80g", "--batch", 16, "--json",
                "--software", "torchtitan", "--fix", "tensor=1,pipeline=1",
                "--fix", "zero=3,microbatch=1,recompute=full")  # fmt: skip
    plain, held, replayed = (
        json.loads(hocket(*question, *more)[0])["candidates"][0]
        for more in ((), ("--options", "offload,float8=tensorwise"), ("--options", "graphs"))
    )
    assert held["peak_bytes"] < plain["peak_bytes"]
    assert held["step_s"] != plain["step_s"]
    assert replayed["step_s"] < plain["step_s"]
    _, err = hocket(*question, "--options", "ofload", expect=2)
    assert "did you mean 'offload'" in err


def test_a_plan_for_devices_without_16_bit_arithmetic_can_be_read(hocket, tmp_path):
    model, cluster, plan = (tmp_path / name for name in ("tiny.toml", "old.toml", "plan.json"))
    model.write_text("hidden = 64\nlayers = 4\nheads = 4\nvocabulary = 1000\nsequence = 64\n")
    cluster.write_text(OLD)
    hocket("parallel", model, "--on", cluster, "--batch", 4, "--json", "-o", plan)
    assert json.loads(plan.read_text())["problem"]["work"]["training"]["content"]["software"] == {
        "name": "hocket",
        "dtype": "float32",
    }
    assert "legal" in hocket("verify", plan)[0]
    for target in ("megatron", "deepspeed"):
        files = hocket("export", plan, "--to", target)[0]
        assert "bf16" not in files
        assert "fp16" not in files


def test_a_schedule_that_the_program_lacks_is_refused(hocket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ("parallel", "gpt-3.6b", "--on", "4xa100-80g", "--batch", 16, "--fix", "schedule=zb-v")
    _, err = hocket(*asked, *MEGATRON, expect=2)
    assert "megatron-core has no schedule zb-v" in err
    assert "it runs 1f1b, interleaved" in err


def test_eighty_columns_keep_what_decides(hocket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    out, _ = hocket("parallel", "gpt3-175b", "--on", "12xdgx-a100-80g", "--batch", 384, *MEGATRON)
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
    out, _ = hocket(
        "parallel", "gpt-3.6b", "--on", "4xa100-80g", "--batch", 16, "--json", *MEGATRON
    )
    result = json.loads(out)
    assert set(result["chosen"]) >= PARALLEL_KEYS
    assert all(set(candidate) >= PARALLEL_KEYS for candidate in result["candidates"])
    assert result["candidates"][0]["step_s"] == result["chosen"]["step_s"]
    assert result["chosen"]["feasible"]
    parts = result["chosen"]["breakdown"]
    assert sum(parts.values()) == pytest.approx(result["chosen"]["step_s"], rel=1e-6)
    assert result["written"] == []


def test_nothing_fits_is_exit_4_and_says_what_would_do(hocket):
    out, err = hocket(
        "parallel", "gpt-39b", "--on", "4xv100-16g", "--batch", 16, "--json", *MEGATRON, expect=4
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
        ([*SMALL, *MEGATRON, "--fix", "schedule=1f1"], 2, "'1f1b'"),
        ([*SMALL, *MEGATRON, "--fix", "tensr=2"], 2, "'tensor'"),
        ([*SMALL, "--software", "megatrn"], 2, "unknown"),
        ([*SMALL, *MEGATRON, "--fix", "tensor=7"], 4, "no config"),
        ([*SMALL, "-o", "no/such/x.json"], 2, "folder"),
        ([*SMALL, *MEGATRON, "--fix", "zero=9"], 2, "zero is 9"),
    ],
)  # fmt: skip
def test_wrong_questions_are_answered_in_a_sentence(
    arguments, code, said, hocket, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    out, err = hocket("parallel", *arguments, expect=code)
    assert said in out + err


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
    words = data["sections"]["schedule"]["actions"][1].split()
    data["sections"]["schedule"]["actions"][1] = " ".join(reversed(words))
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(data))
    out, _ = hocket("verify", path, "--json", expect=6)
    assert "can never start" in json.loads(out)["error"]["message"]


def test_verify_finds_memory_that_the_file_hides(hocket, plan_file, tmp_path):
    data = json.loads(plan_file.read_text())
    parallel = data["sections"]["parallel"]
    parallel["zero"], parallel["layers"] = 0, [sum(parallel["layers"]), 0]
    path = tmp_path / "large.json"
    path.write_text(json.dumps(data))
    out, _ = hocket("verify", path, "--json", expect=6)
    assert "pipeline rank 0 lacks" in json.loads(out)["error"]["message"]


def test_graph_option_has_no_meaning_for_parallel_plans(hocket, plan_file):
    for name in ("show", "simulate", "explain", "verify"):
        assert "no graph" in hocket(name, plan_file, "--graph", "x.json", expect=2)[1]


def test_schema_of_plans_knows_configs(hocket):
    sections = json.loads(hocket("schema", "plan")[0])["properties"]["sections"]["properties"]
    assert {"parallel", "schedule"} <= set(sections)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_table_keeps_its_numbers_at_any_width(width, hocket, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(width))
    fixed = ["--fix", "tensor=1,schedule=1f1b,recompute=none"]
    out, _ = hocket("parallel", "gpt-1.7b", "--on", "2xa100-80g", "--batch", 8, *fixed, *MEGATRON)
    assert "of 80.0 GiB" in out
    assert "longer" in out
    assert ("tokens/s" in out) == (width == 200)


def test_a_count_of_a_kind_says_what_joins_it(hocket):
    _, err = hocket("parallel", "gpt2", "--on", "8xh100", "--batch", 16, "--json", *MEGATRON)
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
    assert "…" not in out, "nothing is cut off at 80 columns"


def test_list_tells_names_apart(hocket):
    planners, presets, models = (
        {
            entry["name"]: entry["is"]
            for entry in json.loads(hocket("list", what, "--json")[0])[what]
        }
        for what in ("planners", "presets", "models")
    )
    assert len(set(planners.values())) == len(planners)
    assert presets["mixed-desktop"] == "machine: 1 x titanx-12g + 1 x v100-16g + 1 x rtx3090"
    assert "1,008 billion" in models["gpt-1t"]


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


@pytest.mark.parametrize(
    ("model", "on", "size"),
    [
        ("gpt2", "2xt4", ("--batch", 4, "--seq", 64)),
        ("vit-base", "1xrtx3090+1xt4", ("--batch", 8)),
        ("llama-1b", "2xdgx-h100", ("--batch", 16, "--seq", 256)),
    ],
)
def test_both_commands_give_one_answer_for_captured_ops(hocket, model, on, size):
    asked = (model, "--on", on, *size, "--json")
    plan = json.loads(hocket("plan", *asked)[0])
    parallel = json.loads(hocket("parallel", *asked)[0])
    chosen = parallel["chosen"]
    assert chosen["strategy"] == plan["chosen"]
    assert parallel["step_s"] == chosen["step_s"] == plan["step_s"]
    assert max(chosen["rank_peak_bytes"]) == max(plan["peak_bytes"].values())
    assert parallel["answered_by"] == plan["answered_by"] == ANSWERED_BY_SIMULATION
    degrees = [(c["data"], c["pipeline"], c["tensor"], c["zero"]) for c in parallel["candidates"]]
    assert (chosen["data"], chosen["pipeline"], chosen["tensor"], chosen["zero"]) == degrees[0]
    assert any(data == 2 and pipeline == 1 for data, pipeline, *_ in degrees) or on == "2xdgx-h100"
    assert all(0 < candidate["mfu"] < 1 for candidate in parallel["candidates"])


def test_the_table_of_captured_ops_has_degrees_and_mfu(hocket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    asked = ("parallel", "gpt2", "--on", "2xt4", "--batch", 4, "--seq", 64)
    out, err = hocket(*asked)
    titles = out.splitlines()[0].split()
    columns = ["strategy", "tensor", "pipe", "data", "micro", "schedule", "ZeRO", "step", "MFU"]
    assert set(columns) <= set(titles)
    assert ANSWERED_BY_SIMULATION in err
    assert "wrote plan.json, report.html" in err
    again = json.loads(hocket("show", "plan.json", "--json")[0])
    assert again["parallel"]["replicas"]
    assert "Candidates" in (tmp_path / "report.html").read_text()


def test_above_64_devices_the_closed_form_is_fitted_to_simulated_steps(hocket):
    asked = ("parallel", "gpt2", "--on", "9xdgx-a100-80g", "--batch", 288, "--seq", 128, "--json")
    found = json.loads(hocket(*asked)[0])
    assert found["answered_by"].startswith("closed form of hocket, fitted to simulated steps of ")
    assert "16 devices of 9xdgx-a100-80g" in found["answered_by"]
    assert found["chosen"]["num_devices"] > 64


def test_settings_of_programs_are_refused_for_captured_ops(hocket):
    asked = ("parallel", "gpt2", "--on", "2xt4", "--batch", 4)
    _, err = hocket(*asked, "--options", "graphs", expect=2)
    assert "the captured ops are simulated as they are" in err
