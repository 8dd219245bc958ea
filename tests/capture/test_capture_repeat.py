"""Stamping out identical blocks gives exactly what recording all of them gives."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

import hocket.capture.model
from hocket.capture import capture, capture_program, execute, named_tensors
from hocket.capture.blocks import find_runs
from hocket.capture.zoo import experts, language, vision

CONSTANT = torch.zeros(8)


class Residual(nn.Module):
    def __init__(self, width, position=0):
        super().__init__()
        self.position = position
        self.norm = nn.LayerNorm(width)
        self.layer = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(torch.relu(self.layer(self.norm(x))))


class Stack(nn.Module):
    """Blocks in a list; subclasses use them in different ways."""

    def __init__(self, count=9, width=8):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Residual(width, index) for index in range(count))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Indexing(Stack):
    def forward(self, x):
        for index in range(9):
            x = self.blocks[index](x)
        return x.sum()


class Collecting(Stack):
    def forward(self, x):
        seen = []
        for block in self.blocks:
            x = block(x)
            seen.append(x)
        return torch.stack(seen).mean()


class Reusing(Stack):
    def forward(self, x):
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return x.sum()


class Counting(Stack):
    """Every block is scaled by its position: no two are alike."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * (1.0 + block.position)
        return x.sum()


class Alternating(Stack):
    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = block(x) if index % 2 else torch.tanh(block(x))
        return x.sum()


class Branching(Stack):
    """Blocks side by side, not one behind the other."""

    def forward(self, x):
        return sum(block(x) for block in self.blocks).sum()


class Sharing(Stack):
    """All blocks use one weight and one view of a mask made in the first of them."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.ones(8))

    def forward(self, x):
        mask = torch.ones(8, 4, device=x.device).triu()
        for block in self.blocks:
            x = functional.linear(block(x) * self.gate, torch.eye(8, device=x.device)) * mask.t()
        return x.sum()


class InPlace(Stack):
    """The residual stream is written in place, block by block."""

    def forward(self, x):
        total = torch.zeros_like(x)
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            total += x.detach()
        return x.sum() + total.mean()


class SkippingAcross(Stack):
    """A U-Net: the second half of the blocks also takes what the first half made."""

    def forward(self, x):
        made = []
        for index, block in enumerate(self.blocks):
            if index > 4:
                x = x + made[8 - index]
            x = block(x)
            made.append(x)
        return x.sum()


class Slicing(Stack):
    def forward(self, x):
        for block in self.blocks[:5]:
            x = block(x)
        return x.sum()


class Touching(Stack):
    """Something happens behind one of the blocks that are left out."""

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = block(x) + 1 if index == 4 else block(x)
        return x.sum()


class Remembering(Stack):
    """What one of the left-out blocks makes is used at the end."""

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 5:
                middle = x.detach()
        return x.sum() + middle.sum()


class Stepping(Stack):
    """One of the left-out blocks takes what the block before the last one made."""

    def forward(self, x):
        before = x
        for index, block in enumerate(self.blocks):
            x, before = block(before if index == 4 else x), x
        return x.sum()


class Peeking(Stack):
    """The weight of a left-out block is used outside it."""

    def forward(self, x):
        return super().forward(x) + self.blocks[4].layer.weight.sum()


class Skipping(Stack):
    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = x if index == 4 else block(x)
        return x.sum()


class Pair(nn.Module):
    """Two tensors and a mask go in, the results are nested."""

    def __init__(self, width):
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, y, *, mask):
        return {"pair": (x + self.right(y), y * self.left(x)), "mask": mask, "scale": 2.0}


class Nested(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.blocks = nn.ModuleList(Pair(width) for _ in range(8))
        self.gate = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y, mask = x * self.gate, torch.ones_like(x)
        for block in self.blocks:
            result = block(x, y, mask=mask)
            (x, y), mask = result["pair"], result["mask"]
            x = torch.tanh(x * self.gate) * result["scale"]
        return (x * y).sum()


def assert_repeat_is_exact(model, batch, optimizer="adamw"):
    stamped = capture(model, batch, optimizer=optimizer)
    full = capture(model, batch, optimizer=optimizer, repeat=False)
    assert stamped.op_names == full.op_names
    assert stamped.tensor_names == full.tensor_names
    assert stamped.content_hash == full.content_hash
    return stamped.meta["stamped_ops"]


def deep_resnet():
    """Two stages with blocks enough to be stamped, as those of the 152 layers."""
    with mock.patch.object(vision, "_stage_sizes", return_value=(3, 8, 9, 3)):
        return vision.resnet(152, 1, size=64)


STAMPED = {
    "stack": lambda: (Stack(), torch.randn(4, 8)),
    "sharing": lambda: (Sharing(), torch.randn(4, 8)),
    "in place": lambda: (InPlace(), torch.randn(4, 8)),
    "sequential": lambda: (
        nn.Sequential(nn.Linear(8, 4), *[Residual(4) for _ in range(7)], nn.Linear(4, 2)),
        torch.randn(4, 8),
    ),
    "nested": lambda: (Nested(), torch.randn(4, 8)),
    "gpt2": lambda: language.gpt2(2, 16, n_layer=7),
    "llama": lambda: language.llama_7b(2, 8, num_hidden_layers=6, hidden_size=32,
                                       num_attention_heads=2, intermediate_size=48),
    "t5": lambda: language.t5_base(2, 8, num_layers=7, d_model=32, d_ff=32, num_heads=2, d_kv=8),
    "resnet": deep_resnet,
    "moe": lambda: experts.moe(1, 8, layers=6, experts=2, width=64, hidden=32, vocabulary=50),
}  # fmt: skip


@pytest.mark.parametrize("name", STAMPED)
def test_repeat_equals_full_capture_of_training(name):
    with torch.device("meta"):
        model, batch = STAMPED[name]()
    assert assert_repeat_is_exact(model, batch) > 0


@pytest.mark.parametrize("name", ["stack", "sharing", "in place", "sequential", "nested", "llama"])
@pytest.mark.parametrize("optimizer", ["sgd", None])
def test_repeat_equals_full_capture_with_other_optimizers(name, optimizer):
    with torch.device("meta"):
        model, batch = STAMPED[name]()
    assert assert_repeat_is_exact(model, batch, optimizer) > 0


FALL_BACK = (Collecting, Reusing, Counting, Alternating, Branching, SkippingAcross, Slicing,
             Touching, Remembering, Stepping, Peeking, Skipping)  # fmt: skip


@pytest.mark.parametrize("kind", FALL_BACK)
@pytest.mark.parametrize("optimizer", ["adamw", None])
def test_repeat_falls_back_to_the_full_capture(kind, optimizer):
    assert assert_repeat_is_exact(kind(), torch.randn(4, 8), optimizer) == 0


def test_repeat_lets_a_model_index_and_count_its_blocks():
    assert assert_repeat_is_exact(Indexing(), torch.randn(4, 8)) > 0


TIES = {
    "to a layer outside": lambda m: (m.blocks[4].layer, m.first),
    "to the next block": lambda m: (m.blocks[4].layer, m.blocks[5].layer),
    "to the first block": lambda m: (m.blocks[4].layer, m.blocks[0].layer),
    "inside the block": lambda m: (m.blocks[4].layer, m.blocks[4].other),
}


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("optimizer", ["adamw", None])
def test_repeat_falls_back_where_a_block_ties_its_weight(tie, optimizer):
    model = Stack()
    for block in model.blocks:
        block.other = nn.Linear(8, 8)
    tied, to = TIES[tie](model)
    tied.weight = to.weight
    assert assert_repeat_is_exact(model, torch.randn(4, 8), optimizer) == 0


def test_repeat_stamps_blocks_that_all_tie_alike():
    model = Stack()
    for block in model.blocks:
        block.norm = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
        block.norm[1].weight = block.layer.weight
    assert assert_repeat_is_exact(model, torch.randn(4, 8)) > 0


def test_repeat_falls_back_when_stamping_or_linking_fails(monkeypatch):
    x = torch.randn(4, 8)
    full = capture(Stack(), x, repeat=False)
    for name in ("without_stand_ins", "expand", "link"):
        original = getattr(hocket.capture.model, name)
        failures = iter([KeyError("planted")])

        def broken(*args, original=original, failures=failures):
            for failure in failures:
                raise failure
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(hocket.capture.model, name, broken)
            graph = capture(Stack(), x)
        assert graph.content_hash == full.content_hash
        assert graph.meta["stamped_ops"] == 0


def test_repeat_program_computes_what_the_model_computes():
    torch.manual_seed(3)
    model, x = InPlace(), torch.randn(4, 8)
    graph, program = capture_program(model, x)
    assert graph.meta["stamped_ops"] > 0
    torch.manual_seed(5)
    executed = execute(program, named_tensors(model, x))
    torch.manual_seed(5)
    loss = model(x)
    loss.backward()
    assert torch.equal(executed.outputs[0], loss)
    for name, parameter in model.named_parameters():
        assert torch.equal(executed.gradients[name], parameter.grad)


def test_find_runs_allows_numbers_that_count_positions():
    (run,) = find_runs(Stack(8))
    assert run.paths == tuple(f"blocks.{index}" for index in range(8))
    assert run.kept == ("blocks.0", "blocks.1", "blocks.2", "blocks.6", "blocks.7")


def test_find_runs_splits_where_blocks_differ():
    model = Stack(20)
    model.blocks[7].drop.p = 0.5
    model.blocks[15].layer = nn.Linear(8, 8, bias=False)
    assert [len(run.paths) for run in find_runs(model)] == [7, 7]


def test_find_runs_ignores_short_runs_and_one_module_many_times():
    assert find_runs(Stack(5)) == []
    block = Residual(4)
    assert find_runs(nn.Sequential(*[block] * 8)) == []


def test_find_runs_splits_where_memory_is_shared():
    model = Stack(20)
    model.blocks[7].layer.weight = model.first.weight
    model.blocks[15].layer.weight = nn.Parameter(model.blocks[16].layer.weight[:].detach())
    assert [len(run.paths) for run in find_runs(model)] == [7, 7]


def test_find_runs_splits_where_constants_differ():
    model = Stack(14)
    for index, block in enumerate(model.blocks):
        block.constants = [CONSTANT if index != 7 else torch.ones(8)]
    assert [len(run.paths) for run in find_runs(model)] == [7, 6]


def test_repeat_leaves_the_model_untouched():
    model = Stack()
    before = [(name, id(module)) for name, module in model.named_modules()]
    capture(model, torch.randn(4, 8))
    assert [(name, id(module)) for name, module in model.named_modules()] == before
    assert len(model.blocks) == 9
