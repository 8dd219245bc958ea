"""Models that cannot be traced: the line is named and a graph of modules is made."""

import copy
import inspect

import numpy as np
import pytest
import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture import CaptureWarning, UntraceableError, capture, capture_program
from hocket.graph import Phase, Role


class Branchy(nn.Module):
    """Which layers run depends on the data."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        if x.sum().item() > -1e9:
            x = self.second(x) + x
        return self.last(x)


class Choosy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x[x[:, 0] > 0]).sum()


def line_of(cls, text):
    lines, start = inspect.getsourcelines(cls)
    return f"{__file__}:{start + next(i for i, line in enumerate(lines) if text in line)}"


def test_capture_untraceable_model_gives_one_op_per_module():
    torch.manual_seed(0)
    model = Branchy()
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(CaptureWarning, match="takes a value out of a tensor"):
        graph = capture(model, torch.randn(3, 4))
    forward = [graph.op_names[op] for op in np.flatnonzero(graph.op_phase == Phase.FORWARD)]
    modules = [name for name in forward if not name.startswith("model")]
    assert modules == ["first", "second.0", "second.1", "second.2", "last"]
    assert graph.kinds[graph.op_kind[forward.index("second.1")]] == "module.BatchNorm1d"
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key])


def test_capture_module_graph_keeps_sizes_pairs_and_updates():
    torch.manual_seed(0)
    with pytest.warns(CaptureWarning):
        graph = capture(Branchy(), torch.randn(3, 4))
    assert graph.meta["level"] == "module"
    names = dict(zip(graph.op_names, range(graph.num_ops), strict=True))
    assert graph.partner[names["last.backward"]] == names["last"]
    assert graph.flops[names["first"]] == 2 * 3 * 4 * 4
    assert graph.group[names["first"]] == graph.group[names["first.weight/adamw"]] >= 0
    parameters = 4 * sum(p.numel() for p in Branchy().parameters())
    roles = graph.bytes_by_role()
    assert roles["parameter"] == roles["gradient"] == parameters
    assert roles["optimizer_state"] == 2 * parameters
    outputs = np.flatnonzero(graph.tensor_role == Role.OUTPUT)
    assert graph.tensor_bytes[outputs].tolist() == [4]


def test_capture_names_the_line_in_the_users_code():
    with pytest.warns(CaptureWarning):
        graph = capture(Branchy(), torch.randn(3, 4))
    assert graph.meta["why"].startswith(line_of(Branchy, ".item()"))
    with pytest.raises(UntraceableError) as caught:
        capture_program(Branchy(), torch.randn(3, 4))
    assert caught.value.where == line_of(Branchy, ".item()")


def test_capture_says_that_shapes_depend_on_data():
    with pytest.warns(CaptureWarning, match="shape of the result of aten.nonzero"):
        graph = capture(Choosy(), torch.ones(3, 4), optimizer=None)
    assert np.all(graph.op_phase == Phase.FORWARD)


def test_capture_untraceable_model_without_weights_is_refused():
    with torch.device("meta"):
        model, x = Branchy(), torch.randn(3, 4)
    with pytest.raises(UntraceableError, match="cannot trace Branchy") as caught:
        capture(model, x)
    assert "real weights" in caught.value.hint
    assert caught.value.where == line_of(Branchy, ".item()")


def test_capture_model_that_fails_on_its_batch_is_refused():
    with pytest.raises(UsageError, match="fails on this batch") as caught:
        capture(Branchy(), torch.randn(3, 5))
    assert caught.value.where == line_of(Branchy, "self.first(x)")
    with pytest.raises(UsageError, match="positional arguments"):
        capture(Branchy(), (torch.randn(3, 4), torch.randn(3, 4)))


def test_a_model_that_skips_layers_at_random_is_told_what_to_switch(tmp_path, monkeypatch):
    from cli.terminal import hocket

    (tmp_path / "opt.py").write_text(
        "import torch\nfrom transformers import OPTConfig, OPTForCausalLM\n"
        "def make(batch=2, training=True):\n"
        "    config = OPTConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, ffn_dim=16,\n"
        "        num_attention_heads=2, max_position_embeddings=32, word_embed_proj_dim=16,\n"
        "        layerdrop=0.1)\n"
        "    tokens = torch.zeros(batch, 8, dtype=torch.long)\n"
        "    model = OPTForCausalLM(config).train(training)\n"
        "    return model, {'input_ids': tokens, 'labels': tokens}\n"
        "def still(batch=2):\n    return make(batch, False)\n"
    )
    plan = ["--on", "1xcpu-core", "--planner", "one-device"]
    coarse = hocket("plan", "opt.py:make", *plan, cwd=tmp_path).stderr
    assert "layerdrop" in coarse
    assert "model.eval()" in coarse
    assert "hocket run" not in coarse
    fine = hocket("plan", "opt.py:still", *plan, cwd=tmp_path).stderr
    assert "layerdrop" not in fine
    assert "hocket run plan.json" in fine
