"""Models from names, TOML files and HF configurations."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import InputFileError, UsageError
from hocket.transformer.counts import parameter_counts
from hocket.transformer.files import (
    find_model,
    from_hf_config,
    model_from_dict,
    model_to_dict,
    preset_names,
    read_model,
)

SMALL = {"hidden": 64, "layers": 2, "heads": 4, "vocabulary": 100, "sequence": 32}


@pytest.mark.parametrize("name", preset_names())
def test_preset_states_its_source_and_survives_a_round_trip(name):
    model = find_model(name)
    assert model.name == name
    assert model.source
    assert model_from_dict(model_to_dict(model)) == model


def test_unknown_preset_names_the_closest():
    with pytest.raises(UsageError, match="gpt-175b") as caught:
        find_model("gpt-175b")
    assert "did you mean 'gpt-" in str(caught.value)


def test_toml_needs_only_what_models_differ_in(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(f"{key} = {value}" for key, value in SMALL.items()))
    model = find_model(str(path))
    assert (model.name, model.mlp_width, model.head_width, model.kv_heads) == ("mine", 256, 16, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hiden": 3}, "unknown key 'hiden'.*\n.*did you mean 'hidden'"),
        ({"layers": 0}, "layers is 0"),
        ({"layers": True}, "layers is True"),
        ({"heads": "four"}, "heads is 'four'"),
        ({"kv_heads": 3}, "cannot share 3"),
        ({"mlp": "relu"}, "mlp is 'relu'"),
        ({"mlp": "swiglu"}, "no key 'mlp_width'"),
        ({"heads": 65}, "more heads than hidden"),
        ({"heads": 5}, "cannot be shared by 5 heads"),
        ({"experts": {"count": 2, "active": 3, "mlp_width": 8}}, "3 of 2 experts"),
        ({"experts": {"count": 2, "active": 1}}, "no key 'mlp_width'"),
        (
            {"experts": {"count": 2, "active": 1, "mlp_width": 8, "dense_layers": 2}},
            "2 of 2 layers",
        ),
        ({"dropout": 1}, "dropout is 1"),
    ],
)
def test_impossible_models_are_refused_with_the_key(change, message):
    with pytest.raises(InputFileError, match=message):
        model_from_dict({**SMALL, **change})


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from([*SMALL, "mlp", "experts", "kv_heads", "name", "biases"]),
        st.one_of(
            st.integers(), st.text(max_size=5), st.booleans(), st.none(), st.floats(),
            st.dictionaries(st.sampled_from(["count", "active", "mlp_width"]), st.integers(-2, 9)),
        ),
    )
)  # fmt: skip
def test_any_mapping_gives_a_model_or_an_error_for_people(data):
    try:
        model = model_from_dict({**SMALL, **data})
    except InputFileError:
        return
    assert model_from_dict(model_to_dict(model)) == model


@pytest.mark.parametrize("text", ["hidden = ", "hidden = [", "\x00", "a = 1\na = 2"])
def test_broken_toml_is_an_input_error(tmp_path, text):
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(InputFileError):
        read_model(path)


# ── Hugging Face ─────────────────────────────────────────────────────────────────────────────────

CONFIGS = {
    # Figures of the released configurations; parameters as the model cards count them.
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
         "vocab_size": 50257, "resid_pdrop": 0.1},
        124_439_808,
    ),
    "pythia-70m": (
        {"model_type": "gpt_neox", "hidden_size": 512, "num_hidden_layers": 6,
         "num_attention_heads": 8, "intermediate_size": 2048, "vocab_size": 50304,
         "max_position_embeddings": 2048, "tie_word_embeddings": False},
        70_426_624,
    ),
    "opt-125m": (
        {"model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12,
         "num_attention_heads": 12, "ffn_dim": 3072, "vocab_size": 50272,
         "max_position_embeddings": 2048, "word_embed_proj_dim": 768, "dropout": 0.1},
        # Without the two rows that its table of positions has more.
        125_239_296 - 2 * 768,
    ),
    "llama-3-8b": (
        {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
         "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False},
        8_030_261_248,
    ),
    "mistral-7b": (
        {"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
         "vocab_size": 32000, "max_position_embeddings": 32768},
        7_241_732_096,
    ),
    "mixtral": (
        {"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
         "vocab_size": 32000, "max_position_embeddings": 32768, "num_local_experts": 8,
         "num_experts_per_tok": 2},
        46_702_792_704,
    ),
    "deepseek-v3": (
        {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
         "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
         "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
         "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512,
         "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
         "v_head_dim": 128, "vocab_size": 129280, "max_position_embeddings": 163840,
         "tie_word_embeddings": False},
        # Without the bias of each expert's score.
        671_026_419_200 - 58 * 256,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_hf_configurations_have_the_parameters_of_the_released_weights(name):
    config, parameters = CONFIGS[name]
    assert parameter_counts(from_hf_config(config)).total == parameters


def test_hf_families_that_only_approximate_are_within_a_thousandth():
    bloom = {"model_type": "bloom", "hidden_size": 14336, "n_layer": 70, "n_head": 112,
             "vocab_size": 250880, "seq_length": 2048}  # fmt: skip
    assert parameter_counts(from_hf_config(bloom)).total == pytest.approx(176_247_271_424, rel=1e-3)
    qwen = {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
            "vocab_size": 152064, "max_position_embeddings": 131072,
            "tie_word_embeddings": False}  # fmt: skip
    assert parameter_counts(from_hf_config(qwen)).total == pytest.approx(7_615_616_512, rel=1e-3)


def test_hf_file_is_found_by_its_content(tmp_path):
    folder = tmp_path / "my-gpt"
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIGS["gpt2"][0], "n_inner": None, "extra": [1]}))
    model = find_model(str(path))
    assert (model.name, model.mlp_width, model.dropout) == ("my-gpt", 3072, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 5}, "12 heads cannot share 5 heads"),
        ({"n_head": 1000}, "more heads than hidden"),
    ],
)
def test_hf_files_with_impossible_shapes_are_refused(change, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIGS["gpt2"][0], **change}))
    with pytest.raises(InputFileError, match=message):
        find_model(str(path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5"}, "family 't5' is not known"),
        ({"model_type": None}, "family None"),
        ({"model_type": "llama", "hidden_size": 8}, "no key 'num_attention_heads'"),
        ({**CONFIGS["opt-125m"][0], "word_embed_proj_dim": 512}, "embedding is 512 wide"),
        ({**CONFIGS["gpt2"][0], "n_layer": -1}, "n_layer is -1"),
        ({**CONFIGS["gpt2"][0], "resid_pdrop": "x"}, "resid_pdrop is 'x'"),
    ],
)
def test_hf_configurations_that_cannot_be_used_are_refused(config, message):
    with pytest.raises(InputFileError, match=message):
        from_hf_config(config)


def test_json_that_is_no_model_says_what_to_write(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(InputFileError, match="no key 'model_type'") as caught:
        find_model(str(path))
    assert "vocabulary" in caught.value.hint


QWEN2 = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896,
    "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}  # fmt: skip


def test_hf_names_come_from_the_local_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    model = tmp_path / "hub" / "models--Qwen--Qwen2-0.5B"
    for revision, layers in (("aaa", 12), ("bbb", 24)):
        folder = model / "snapshots" / revision
        folder.mkdir(parents=True)
        text = json.dumps(QWEN2 | {"num_hidden_layers": layers})
        (folder / "config.json").write_text(text)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("bbb")
    shape = find_model("hf:Qwen/Qwen2-0.5B")
    assert (shape.name, shape.layers, shape.kv_heads) == ("Qwen/Qwen2-0.5B", 24, 2)
    with pytest.raises(UsageError, match="not in the cache") as caught:
        find_model("hf:Qwen/Qwen2-0.6B")
    assert "did you mean 'Qwen/Qwen2-0.5B'" in caught.value.hint
    for odd in ("hf:", "hf:../../etc/passwd", "hf:a/b/c"):
        with pytest.raises(UsageError, match="cannot read"):
            find_model(odd)
