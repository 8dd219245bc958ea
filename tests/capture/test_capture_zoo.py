"""The zoo builds the published models, and users can name their own."""

import json
import subprocess
import sys

import pytest
import torch

from hocket.base.errors import InputFileError, UsageError
from hocket.capture import ZOO, capture, load_model
from hocket.transformer.counts import parameter_counts
from hocket.transformer.files import find_model

PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "llama-1b": 1_235_814_400,
    "llama-7b": 6_738_415_616,
    "t5-base": 222_903_552,
    "vit-base": 86_567_656,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "wide-resnet": 126_886_696,
    "inception-v3": 27_161_264,
    "whisper-small": 241_734_912,
}
"""Published by the models' authors or their reference implementations."""


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PARAMETERS)
def test_zoo_model_has_the_published_number_of_parameters(name):
    model, _ = load_model(name)
    assert num_parameters(model) == PARAMETERS[name]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_zoo_names_build():
    assert set(ZOO) >= {*PARAMETERS, *QUICK, *UNROLLED, "moe-12x32", "resnet1001"}
    model, _ = load_model("resnet1001")
    assert sum(isinstance(m, torch.nn.Conv2d) for m in model.modules()) == 1000 + 4


def test_sdxl_unet_has_the_published_size():
    model, _ = load_model("sdxl-unet")
    assert num_parameters(model) == pytest.approx(2.567e9, rel=0.01)


def test_zoo_experts_have_two_million_parameters_each():
    model, _ = load_model("moe-12x32")
    layers = model.layers
    assert (len(layers), len(layers[0].mixture.experts)) == (12, 32)
    assert num_parameters(layers[0].mixture.experts[0]) == pytest.approx(2.1e6, rel=0.01)
    assert num_parameters(model) == pytest.approx(852e6, rel=0.001)


QUICK = ("gpt2", "bert-large", "llama-1b", "t5-base", "vit-base", "mixtral-small", "resnet50",
         "inception-v3", "mlp")  # fmt: skip
UNROLLED = {"gnmt-4": 3, "gnmt-8": 2, "lstm": 4}


@pytest.mark.parametrize("name", [*QUICK, *UNROLLED])
def test_zoo_model_captures(name):
    model, batch = load_model(name, batch=2, seq=UNROLLED.get(name, 16))
    graph = capture(model, batch, name=name)
    assert graph.meta["level"] == "op"
    assert graph.meta["model"] == name
    assert graph.meta["batch"] == 2
    gradient = graph.bytes_by_role()["gradient"]
    assert gradient == sum(p.numel() * p.element_size() for p in model.parameters())


def test_load_model_builds_residual_networks_of_any_fitting_depth():
    model, _ = load_model("resnet200")
    assert sum(isinstance(m, torch.nn.Conv2d) for m in model.modules()) == 199 + 4
    with pytest.raises(UsageError, match="no residual network with 60 layers") as caught:
        load_model("resnet60")
    assert "1001" in caught.value.hint


def test_load_model_takes_batch_seq_dtype_and_device():
    model, batch = load_model("mlp", batch=3, dtype="bfloat16", device="cpu")
    assert batch["inputs"].shape == (3, 1024)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    assert model(**batch).isfinite()


@pytest.mark.parametrize(
    ("spec", "options", "message", "hint"),
    [
        ("gtp2", {}, "unknown model 'gtp2'", "did you mean 'gpt2'"),
        ("vit", {}, "unknown model 'vit'", "did you mean 'vit-base'"),
        ("t5-small", {}, "unknown model 't5-small'", "did you mean 't5-base'"),
        ("gpt2", {"dtype": "float31"}, "unknown dtype 'float31'", "did you mean 'float32'"),
        ("gpt2", {"batch": 0}, "batch is 0", "1 or more"),
        ("no_such_module:make", {}, "cannot import 'no_such_module'", "package.module:function"),
        ("nowhere.py:make", {}, "there is no file 'nowhere.py'", "path/file.py:function"),
    ],
)
def test_load_model_refuses_bad_names_with_a_hint(spec, options, message, hint):
    with pytest.raises(UsageError, match=message) as caught:
        load_model(spec, **options)
    assert hint in caught.value.hint


FACTORY = """
import torch
def make(batch=2):
    return torch.nn.Linear(4, 4), torch.randn(batch, 4)
def wrong():
    return torch.nn.Linear(4, 4)
"""


def test_load_model_calls_the_users_function(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FACTORY)
    model, batch = load_model(f"{path}:make", batch=5)
    assert batch.shape == (5, 4)
    assert capture(model, batch).meta["batch"] == 5
    for spec, options, message in (
        ("mak", {}, "has no function 'mak'"),
        ("wrong", {}, "not a model and a batch"),
        ("make", {"seq": 3}, "has no parameter 'seq'"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            load_model(f"{path}:{spec}", **options)
        assert caught.value.hint


BROKEN = """
import json
def raises():
    raise ValueError("boom")
def parses():
    return json.loads("{")
def refuses():
    from hocket.base.errors import InputFileError
    raise InputFileError("no data")
"""


def test_load_model_names_the_line_where_the_users_function_fails(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(BROKEN)
    for name, line, message in (
        ("raises", 4, "ValueError: boom"),
        ("parses", 6, "JSONDecodeError"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            load_model(f"{path}:{name}")
        assert caught.value.where == f"{path}:{line}"
        assert "outside hocket" in caught.value.hint
    with pytest.raises(InputFileError, match="no data"):
        load_model(f"{path}:refuses")


@pytest.mark.parametrize(
    ("text", "message"),
    [("x = 1\nnope\n", "NameError: name 'nope'"), ("x = 1\nx = = 1\n", "SyntaxError: "),
     ("x = 1\nimport no_such_module\n", "No module named 'no_such_module'")],
)  # fmt: skip
def test_load_model_names_the_line_that_does_not_import(tmp_path, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        load_model(f"{path}:make")
    assert caught.value.where == f"{path}:2"


def test_load_model_names_no_line_where_there_is_no_module():
    with pytest.raises(UsageError) as caught:
        load_model("no_such_module:make")
    assert caught.value.where == ""


def test_capture_room_imports_without_transformers_pydantic_or_numba():
    code = (
        "import sys, hocket.capture; "
        "print([m for m in ('transformers', 'pydantic', 'numba', 'ray') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize(
    "name",
    ["gpt2", "gpt2-medium", "llama-1b", "mixtral-small", "llama3-8b", "gpt-1.7b", "gemma2-2b"],
)
def test_a_name_means_one_model_for_plan_and_for_parallel(name):
    model, _ = load_model(name, batch=1, seq=8)
    shape = find_model(name)
    assert num_parameters(model) == parameter_counts(shape).total


@pytest.mark.parametrize(
    ("family", "sizes", "architecture"),
    [
        ("qwen2", {"num_key_value_heads": 2}, "Qwen2ForCausalLM"),
        ("gemma", {"num_key_value_heads": 1, "head_dim": 32}, None),
        ("gpt_neox", {}, "GPTNeoXForCausalLM"),
        ("t5", {"d_model": 64, "d_ff": 128}, "T5ForConditionalGeneration"),
        ("vit", {"image_size": 32, "patch_size": 8}, "ViTForImageClassification"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "BloomForCausalLM"),
        # Their stacks draw whether to skip a layer even where none may be skipped.
        ("opt", {"ffn_dim": 128, "word_embed_proj_dim": 64}, "OPTForCausalLM"),
        (
            "whisper",
            {
                "d_model": 64,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": 128,
                "decoder_ffn_dim": 128,
                "max_source_positions": 24,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "decoder_start_token_id": 1,
            },
            "WhisperForConditionalGeneration",
        ),
    ],
)
def test_a_config_file_is_a_model(family, sizes, architecture, tmp_path):
    config = {
        "model_type": family, "hidden_size": 64, "num_hidden_layers": 2, "num_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 320, **sizes,
    }  # fmt: skip
    if architecture:
        config["architectures"] = [architecture]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    graph = capture(*load_model(str(path), batch=2, seq=16))
    assert graph.num_ops > 50


def test_a_config_that_is_no_model_says_what_is_wrong(tmp_path):
    path = tmp_path / "config.json"
    for config, message in (
        ({"model_type": "nonsense"}, "transformers does not know"),
        ({"model_type": "gpt2", "n_layer": 10**9}, "n_layer"),
        ({"model_type": "gpt2", "architectures": ["os"]}, "has no model 'os'"),
        ({"model_type": "whisper", "architectures": ["WhisperForAudioClassification"]}, "to feed"),
    ):
        path.write_text(json.dumps(config))
        with pytest.raises(InputFileError, match=message):
            load_model(str(path), batch=1, seq=8)


def test_a_file_of_ones_own_imports_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "net_beside_it.py").write_text(
        "import torch\ndef made(): return torch.nn.Linear(3, 2), torch.zeros(4, 3)\n"
    )
    (tmp_path / "mine.py").write_text("from net_beside_it import made\n")
    model, batch = load_model(f"{tmp_path / 'mine.py'}:made")
    assert (model.in_features, tuple(batch.shape)) == (3, (4, 3))
