"""Nets of other kinds are cut the same way: residual sums, transformers on images and on text."""

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from hocket.base.errors import UsageError
from hocket.classes.artefact import read_folder
from hocket.classes.cut import PartCut, best_units, build_part
from hocket.classes.data import Splits
from hocket.classes.exported import as_onnx
from hocket.classes.fit import cut_to, pruned_overlap
from hocket.classes.material import ClassScores, Material, class_scores
from hocket.classes.session import infer, open_session
from hocket.classes.settings import HybridCriterion, NetTraining, SplitRequest
from hocket.classes.sources import load_data
from hocket.classes.split import split
from hocket.classes.stepping import LabelledBatch, MomentumDescent, captured_work
from hocket.classes.structure import multiplications, structure_of
from hocket.classes.training import (
    Labelled,
    folded,
    learn,
    outputs_of,
    own_labels,
    parts_lesson,
    places,
    train_parts,
)
from hocket.classes.widths import Floors, chosen_widths
from hocket.runtime.process_settings import torch_threads

CLASSES = (1, 3)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """For nets so small, threads wait for each other longer than they compute."""
    with torch_threads(1):
        yield


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.norm = nn.Conv2d(inputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x):
        return functional.relu(
            self.second(functional.relu(self.norm(self.first(x)))) + self.shortcut(x)
        )


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 1, 1)
        self.blocks = nn.Sequential(Block(32, 32), Block(32, 64), Block(64, 64))
        self.head = nn.Linear(64, 6)

    def forward(self, x):
        return self.head(self.blocks(functional.relu(self.stem(x))).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.num_heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            layer(x).view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """On images of 8 x 8 in patches of 2 x 2, or on 16 tokens."""

    def __init__(self, *, text):
        super().__init__()
        self.text = text
        self.embed = nn.Embedding(50, 64) if text else nn.Conv2d(3, 64, 2, 2)
        self.position = nn.Parameter(torch.randn(1, 16, 64))
        self.blocks = nn.Sequential(Encoder(), Encoder())
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 6)

    def forward(self, x):
        tokens = self.embed(x) if self.text else self.embed(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(tokens + self.position)).mean(1))


def pixels():
    return torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def tokens():
    return torch.randint(50, (60, 16), generator=torch.Generator().manual_seed(0))


NETS = {
    "residual": (Residual, pixels),
    "vision transformer": (lambda: Transformer(text=False), pixels),
    "text": (lambda: Transformer(text=True), tokens),
}


def test_the_hybrid_criterion_keeps_channels_that_are_strong_or_often_on():
    near_zero = np.array([[0.9, 0.9, 0.5, 0.99], [0.8, 0.8, 0.5, 0.5]])
    rectified = np.array([[0.0, 0.5, 0.0, 0.0], [0.01, 0.5, 0.0, 0.03]])
    scores = ClassScores(np.zeros((2, 1)), (), np.zeros((2, 0)), (near_zero,), (rectified,))
    test = HybridCriterion(theta1=0.73, theta2=0.01)
    # Mostly zero and weak; mostly zero but strong; often on; for both classes too strong.
    assert scores.pruned((0,), test)[0].tolist() == [True, False, False, True]
    assert scores.pruned((0, 1), test)[0].tolist() == [True, False, False, False]


@pytest.mark.parametrize("name", NETS)
def test_the_hybrid_criterion_cuts_any_net_and_leaves_shared_streams_alone(name):
    torch.manual_seed(0)
    make, inputs_of = NETS[name]
    net, inputs = make().eval(), inputs_of()
    structure = structure_of(net, inputs[:1], 6)
    labels = torch.arange(60) % 6
    scores = class_scores(net, structure, inputs, labels, 6)
    request = SplitRequest(net="", data="", hybrid=HybridCriterion(theta1=0.3, theta2=1.0))
    data = Labelled(inputs, labels)
    splits = Splits(data, data, data, tuple("abcdef"))
    material = Material(request, net, splits, structure, scores, "")
    cut = cut_to(material, CLASSES, 0.0)
    for stream, parts, kept in zip(structure.model.streams, structure.parts, cut.kept, strict=True):
        is_shared = len(parts.norms or parts.producers) > 1 or parts.heads > 1
        assert len(kept) == stream.units if is_shared else len(kept) >= 2
    assert build_part(net, structure, inputs[:1], cut)(inputs[:2]).shape == (2, 3)
    overlap = pruned_overlap(material, 0.0)
    assert overlap.shape == (6, 6)
    assert (overlap == overlap.T).all()
    assert (np.diag(overlap) == 1).all()


@pytest.mark.parametrize("name", NETS)
def test_a_part_has_a_fraction_of_the_work_and_runs_anywhere(name):
    torch.manual_seed(0)
    make, inputs_of = NETS[name]
    net, inputs = make().eval(), inputs_of()
    before = net(inputs[:2]).detach()
    labels = torch.arange(60) % 6
    structure = structure_of(net, inputs[:1], 6)
    whole = structure.model.macs(np.ones(len(structure.parts)))
    assert whole == pytest.approx(sum(multiplications(net, inputs[:1]).values()))
    scores = class_scores(net, structure, inputs, labels, 6)
    assert all(each.sum(axis=1) == pytest.approx(1) for each in scores.units)
    values = scores.of_group(CLASSES)
    model, influence = structure.model, scores.influence(CLASSES)
    chosen = chosen_widths(model, values, 0.1 * whole, Floors(), influence)
    omitted = tuple(model.blocks[each].name for each in chosen.omitted)
    cut = PartCut(CLASSES, best_units(values, chosen.units), omitted)
    part = build_part(net, structure, inputs[:1], cut)
    kept = np.array([w / s.units for w, s in zip(chosen.units, model.streams, strict=True)])
    work = sum(multiplications(part, inputs[:1]).values())
    # The model of widths counts what the cut net does, but for its smaller head.
    assert work == pytest.approx(model.macs(kept, chosen.omitted), rel=0.02)
    assert work <= 0.1 * whole
    sizes = [sum(each.numel() for each in model.parameters()) for model in (net, part)]
    assert sizes[1] < sizes[0] / 5
    answer = infer(open_session(as_onnx(part, inputs[:1])), inputs[:1].numpy())
    assert answer.shape == (1, 3)
    assert answer == pytest.approx(outputs_of(part, inputs[:1]).numpy(), abs=1e-3)
    assert torch.equal(net(inputs[:2]), before)  # the whole net is untouched


def test_the_streams_of_a_residual_net_are_those_that_sums_tie():
    structure = structure_of(Residual(), pixels()[:1], 6)
    producers = {frozenset(each.producers) for each in structure.parts}
    assert frozenset({"stem", "blocks.0.second"}) in producers
    tied = {"blocks.1.second", "blocks.1.shortcut", "blocks.2.second"}
    assert frozenset(tied) in producers
    assert len(structure.parts) == 5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # The second block widens: its shortcut is a layer of its own.
        ("residual", ["blocks.0", "blocks.2"]),
        ("vision transformer", ["blocks.0", "blocks.1"]),
        ("text", ["blocks.0", "blocks.1"]),
    ],
)
def test_blocks_that_only_add_can_be_left_out(name, expected):
    torch.manual_seed(0)
    make, inputs_of = NETS[name]
    net, inputs = make().eval(), inputs_of()
    structure = structure_of(net, inputs[:1], 6)
    assert [block.name for block in structure.model.blocks] == expected
    shares = class_scores(net, structure, inputs, torch.arange(60) % 6, 6).blocks
    assert shares.shape == (6, 2)
    assert ((shares > 0) & (shares < 1)).all()
    last = structure.model.blocks[-1]
    kept = tuple(
        () if index in last.inner else tuple(range(stream.units))
        for index, stream in enumerate(structure.model.streams)
    )
    part = build_part(net, structure, inputs[:1], PartCut(CLASSES, kept, (last.name,)))
    before, after = (multiplications(each, inputs[:1]) for each in (net, part))
    assert set(before) - set(after) == set(last.layers)
    net.blocks[int(last.name[-1])] = nn.Identity()
    assert part(inputs[:4]).detach()[:, 1:] == pytest.approx(
        net(inputs[:4]).detach()[:, list(CLASSES)], abs=1e-4
    )


def test_channels_of_attention_are_cut_in_all_heads_at_once():
    structure = structure_of(Transformer(text=True), tokens()[:1], 6)
    attention = [each for each in structure.parts if "attention.query" in each.root]
    assert [each.heads for each in attention] == [4, 4]
    assert attention[0].channels_of(3, 16) == [3, 19, 35, 51]


def test_a_text_classifier_is_split_as_any_other(tmp_path):
    spec = str(Path(__file__).parent / "text_nets.py")
    recipe = NetTraining(steps=60, batch=64, optimizer="adamw", learning_rate=0.01)
    request = SplitRequest(
        net=f"{spec}:transformer", data=f"{spec}:texts", parts=2, work=0.4, train_steps=60,
        rounds=0, accuracy_loss=10, retraining=recipe,
    )  # fmt: skip
    done = split(request, tmp_path, progress=lambda *far: None)
    assert done.validation.test_whole > 0.8
    assert done.validation.test_parts > done.validation.test_whole - 0.1
    folder = read_folder(tmp_path)
    assert folder.table.input_dtype == "int64"
    assert max(part.macs for part in folder.table.parts) <= 0.4 * folder.table.whole.macs
    # What would be served says what was validated.
    test = load_data(request.data, 0).test
    sessions = [open_session(model) for model in folder.models]
    said = [
        folder.table.combiner().scores([infer(each, text[None])[0] for each in sessions]).argmax()
        for text in test.inputs.numpy()
    ]
    right = np.mean(np.array(said) == test.labels.numpy())
    assert right == pytest.approx(done.validation.test_parts, abs=0.02)


def test_a_recurrent_layer_is_refused():
    net = nn.Sequential(nn.Embedding(60, 8), nn.GRU(8, 8), nn.Linear(8, 6))
    with pytest.raises(UsageError, match=r"1 \(GRU.*cannot be cut"):
        structure_of(net, torch.zeros(1, 12, dtype=torch.long), 6)


def test_nothing_cut_and_nothing_learnt_says_what_the_whole_net_says():
    torch.manual_seed(0)
    net = Residual().eval()
    structure = structure_of(net, pixels()[:1], 6)
    everything = tuple(tuple(range(stream.units)) for stream in structure.model.streams)
    part = build_part(net, structure, pixels()[:1], PartCut(CLASSES, everything))
    whole = net(pixels()).detach()[:, list(CLASSES)]
    assert part(pixels()).detach()[:, 1:] == pytest.approx(whole, abs=1e-4)


def test_a_part_learns_its_classes_from_labels_and_from_the_whole_net():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(300) % 6
    inputs = torch.randn(6, 10, generator=generator)[labels] + 0.3 * torch.randn(
        300, 10, generator=generator
    )
    torch.manual_seed(0)
    part = nn.Linear(10, 3)
    recipe = NetTraining(steps=60, batch=32)
    train_parts([part], [CLASSES], None, Labelled(inputs, labels), recipe)
    said = outputs_of(part, inputs).argmax(dim=1)
    assert (said == own_labels(labels, CLASSES)).float().mean() > 0.95
    logits = torch.randn(4, 6, generator=generator)
    shares = folded(logits, *places(CLASSES, 6, logits.device)).exp()
    assert shares.sum(dim=1).numpy() == pytest.approx(1, abs=1e-5)
    assert shares[:, 1:] == pytest.approx(logits.softmax(dim=1)[:, list(CLASSES)], abs=1e-5)


def test_descent_is_that_of_torch():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    descent = MomentumDescent(list(ours.parameters()), 5e-4)
    known = torch.optim.SGD(
        theirs.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    descent.rate.fill_(0.1)
    for _ in range(5):
        given = torch.randn(8, 4)
        for net, optimizer in ((ours, descent), (theirs, known)):
            optimizer.zero_grad(set_to_none=True)
            net(given).square().sum().backward()
            optimizer.step()
    assert ours.weight.detach() == pytest.approx(theirs.weight.detach(), rel=1e-5, abs=1e-7)


def test_a_recorded_step_keeps_what_its_graph_reads(monkeypatch):
    """A graph knows addresses: weights that were given back would be overwritten."""
    stand_in = SimpleNamespace(wait_stream=lambda other: None, replay=lambda: None)
    for name in ("Stream", "CUDAGraph", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: stand_in)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *given, **named: nullcontext())

    def recorded():
        net = nn.Linear(2, 2)
        return captured_work(lambda: net(torch.zeros(1, 2)), torch.device("cuda")), weakref.ref(net)

    work, net = recorded()
    work.start()
    work.finish()
    gc.collect()
    assert net() is not None


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_parts_learn_side_by_side_as_they_would_alone(optimizer):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(300) % 6
    inputs = torch.randn(6, 10, generator=generator)[labels] + 0.3 * torch.randn(
        300, 10, generator=generator
    )
    teacher = nn.Linear(10, 6)
    groups = [(0, 1), (2,), (3, 4, 5)]
    recipe = NetTraining(steps=40, batch=50, learning_rate=0.02, optimizer=optimizer)

    def trained(groups):
        parts = []
        for mine in groups:
            torch.manual_seed(0)
            parts.append(nn.Linear(10, 1 + len(mine)))
        steps = train_parts(parts, groups, teacher, Labelled(inputs, labels), recipe)
        assert steps == 40
        return parts

    for mine, part in zip(groups, trained(groups), strict=True):
        (alone,) = trained([mine])
        assert torch.equal(part.weight, alone.weight)
        said = outputs_of(part, inputs).argmax(dim=1)
        assert (said > 0).float().mean() < 1
    hurried = NetTraining(steps=10**9, limit_s=0.2, batch=50)
    made = train_parts(trained(groups), groups, None, Labelled(inputs, labels), hurried)
    assert 0 < made < 10**9


def test_lessons_side_by_side_teach_what_each_would_alone():
    data = Labelled(torch.randn(60, 10, generator=torch.Generator().manual_seed(0)),
                    torch.arange(60) % 6)  # fmt: skip

    def lesson(seed):
        torch.manual_seed(seed)
        teacher, part = nn.Linear(10, 6), nn.Linear(10, 3)
        recipe = NetTraining(steps=9, batch=20, seed=seed)
        return part, parts_lesson([part], [CLASSES], teacher, data, recipe)

    recipe = NetTraining(steps=9, batch=20)
    together, alone = [lesson(seed) for seed in (1, 2)], [lesson(seed) for seed in (1, 2)]
    assert learn([each for _, each in together], recipe, lambda done, total: None) == 9
    for (part, _), (other, its) in zip(together, alone, strict=True):
        learn([its], recipe, lambda done, total: None)
        assert torch.equal(part.weight, other.weight)
    assert not torch.equal(together[0][0].weight, together[1][0].weight)


@pytest.mark.parametrize(
    ("classes", "weights"), [((0, 1, 2), [1, 1, 1, 1]), ((0, 1), [0.75, 1.5, 1.5])]
)
def test_the_classes_of_a_part_count_for_half_at_least(classes, weights):
    data = Labelled(torch.zeros(60, 4), torch.arange(60) % 6)
    recipe = NetTraining(steps=1, batch=60, soft_weight=0)
    part = nn.Linear(4, 1 + len(classes))
    loss_of = parts_lesson([part], [classes], None, data, recipe).learners[0]._loss_of
    outputs = torch.zeros(1, 1 + len(classes))
    for label, weight in zip((5, *classes), weights, strict=True):
        batch = LabelledBatch(torch.zeros(1, 4), torch.tensor([label]), None)
        expected = weight * np.log(1 + len(classes))
        assert float(loss_of(outputs, batch)) == pytest.approx(expected)


def test_a_net_without_one_output_per_class_is_refused():
    with pytest.raises(UsageError, match="no linear layer with 7 outputs"):
        structure_of(Residual(), pixels()[:1], 7)
