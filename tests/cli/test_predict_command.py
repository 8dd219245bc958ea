"""``hocket parallel --predict``: one configuration, predicted."""

import json

import pytest
from cli.terminal import PARALLEL_KEYS

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
[parallel]
tensor = 8
pipeline = 2
microbatch = 2
recompute = "full"
"""


def _config(tmp_path, text):
    path = tmp_path / "parallel.toml"
    path.write_text(text)
    return path


def test_predict_one_configuration(hocket, tmp_path):
    out, _ = hocket("parallel", "--predict", _config(tmp_path, CONFIG), "--json")
    result = json.loads(out)
    assert set(result) >= PARALLEL_KEYS
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
[parallel]
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
        (("tensor = 8", "tensor = 7"), "is not divisible by tensor 7"),
        (("tensor = 8", "tensor = 'x'"), "parallel.tensor"),
        (("pipeline = 2", "pipeline = 99"), "needed"),
        (("microbatch = 2", "microbatch = 3"), "microbatches of 3"),
        (('"full"', '"ful"'), "did you mean 'full'?"),
        (("batch = 64", "batch = 0"), "batch is 0"),
        (("batch = 64", "batch = 2147483640"), "actions"),
        (("batch = 64", "batch = 64\ndtype = 'float7'"), "dtype"),
        (("[parallel]", "[paralel]"), "did you mean 'parallel'?"),
        (("[parallel]", "parallel = 3\n[x]"), "unknown key"),
        (("batch = 64", "batch = "), "is not TOML"),
        (('"gpt-18b"', "3"), "model is 3"),
    ],
)
def test_bad_configurations_are_refused_with_their_place(change, said, hocket, tmp_path):
    path = _config(tmp_path, CONFIG.replace(*change))
    out, err = hocket("parallel", "--predict", path, "--json", expect=3)
    assert said in out
    assert "parallel.toml" in err


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
        "parallel", "--predict", tmp_path / "parallel.toml", "--json", "-o", plan, expect=4
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


def test_options_of_the_program_are_asked_for_and_stated(hocket, tmp_path):
    question = ("parallel", "llama3-8b", "--on", "8xh100-80g", "--batch", 16, "--json",
                "--software", "torchtitan", "--fix", "tensor=1,pipeline=1",
                "--fix", "zero=3,microbatch=1,recompute=full")  # fmt: skip
    plain, held = (
        json.loads(hocket(*question, *more)[0])["candidates"][0]
        for more in ((), ("--options", "offload,float8=tensorwise"))
    )
    assert held["peak_bytes"] < plain["peak_bytes"]
    assert held["step_s"] != plain["step_s"]
    _, err = hocket(*question, "--options", "ofload", expect=2)
    assert "did you mean 'offload'" in err
    text = CONFIG.replace("batch = 64", 'batch = 64\noptions = ["graphs"]')
    replayed, launched = (
        json.loads(hocket("parallel", "--predict", _config(tmp_path, one), "--json")[0])["step_s"]
        for one in (text, CONFIG)
    )
    assert replayed < launched
    wrong = _config(tmp_path, text.replace("graphs", "graph"))
    _, err = hocket("parallel", "--predict", wrong, expect=3)
    assert "did you mean 'graphs'" in err


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
[parallel]
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
    assert json.loads(plan.read_text())["problem"]["work"]["training"]["content"]["software"] == {
        "name": "hocket",
        "dtype": "float32",
    }
    assert "legal" in hocket("verify", plan)[0]
    for target in ("megatron", "deepspeed"):
        files = hocket("export", plan, "--to", target)[0]
        assert "bf16" not in files
        assert "fp16" not in files
