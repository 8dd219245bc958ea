"""What a captured graph says about memory, aliases, order, pairs and groups."""

import numpy as np
import pytest
import torch
from capture.captured_models import Function, ops_of, tensors_with
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hocket.capture import capture, load_model
from hocket.capture.zoo import language
from hocket.graph import DTYPES, Phase, Role


def transient_peak_bytes(graph):
    """Highest bytes of what ops make, each storage freed after the last reader of any view."""
    root = list(range(graph.num_tensors))
    for tensor, base in enumerate(graph.alias_of.tolist()):
        root[tensor] = root[base] if base >= 0 else tensor
    held = {root[t] for t in np.flatnonzero(graph.is_held)}
    last = {}
    for op in range(graph.num_ops):
        for tensor in (*graph.made_by(op), *graph.reads_of(op).tolist()):
            last[root[tensor]] = op
    freed = [0] * graph.num_ops
    for tensor, op in last.items():
        if tensor not in held:
            freed[op] += int(graph.held_bytes[tensor])
    current = peak = 0
    for op in range(graph.num_ops):
        current += sum(int(graph.held_bytes[t]) for t in graph.made_by(op))
        peak = max(peak, current)
        current -= freed[op]
    return peak


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


def test_capture_gpt2_peak_equals_published_capture():
    with torch.device("meta"):
        model, batch = language.gpt2(8, 1024, attn_implementation="sdpa")
    graph = capture(model.train(), batch, device="cpu")
    # Eager peak of the same step as captured by make_fx with CPU kernels, in MiB.
    assert transient_peak_bytes(graph) / 2**20 == pytest.approx(27249.2, abs=0.05)


@pytest.fixture(scope="module")
def gpt2():
    """The model, a short batch, and a training step on it."""
    model, batch = load_model("gpt2", batch=1, seq=16)
    return model, batch, capture(model, batch)


def test_capture_counts_parameters_states_and_gradients_once(gpt2):
    size = 4 * 124_439_808
    roles = gpt2[2].bytes_by_role()
    assert roles["parameter"] == roles["gradient"] == size
    assert roles["optimizer_state"] == 2 * size
    assert roles["output"] == 4


def test_capture_holds_saved_activations_until_backward():
    graph = capture(Function(lambda x, w: (x @ w).sigmoid().sum()), torch.randn(4, 4))
    (forward,), (backward,) = ops_of(graph, "aten.sigmoid"), ops_of(graph, "aten.sigmoid_backward")
    saved = set(graph.made_by(forward))
    assert saved & set(graph.reads_of(backward).tolist())


# ── views and writes ─────────────────────────────────────────────────────────────────────────────


def test_capture_views_own_no_bytes_and_touch_none():
    graph = capture(Function(lambda x, w: (x.t() @ w).view(-1)[2:].sum()), torch.randn(4, 4))
    view = ops_of(graph, "aten.view")[0]
    (made,) = graph.made_by(view)
    assert graph.alias_of[made] in graph.reads_of(view)
    assert graph.held_bytes[made] == 0
    assert graph.tensor_bytes[made] == 64
    assert graph.bytes_touched[view] == 0
    assert ops_of(graph, "aten.detach") == []


def test_capture_same_view_twice_is_one_op():
    graph = capture(
        Function(lambda x, w: (x @ w.t() + x @ w.t()).sum()), torch.randn(4, 4), optimizer=None
    )
    assert len(ops_of(graph, "aten.t")) == 1
    assert len(ops_of(graph, "aten.mm")) == 2


def test_capture_write_makes_a_new_version_after_all_readers():
    def step(x, w):
        y = x @ w
        kept = y.sum()
        y.mul_(2.0)
        return kept + y.sum()

    graph = capture(Function(step), torch.randn(4, 4), optimizer=None)
    (write,) = ops_of(graph, "aten.mul_")
    first_sum, second_sum = ops_of(graph, "aten.sum")
    (version,) = graph.made_by(write)
    (product,) = graph.made_by(ops_of(graph, "aten.mm")[0])
    assert graph.alias_of[version] == product
    assert version in graph.reads_of(second_sum)
    done = [t for t in graph.made_by(first_sum) if graph.tensor_role[t] == Role.CONTROL]
    assert len(done) == 1
    assert done[0] in graph.reads_of(write)
    assert graph.tensor_bytes[done[0]] == 0


def test_capture_reader_of_another_view_runs_after_the_write():
    def step(x, w):
        y = x @ w
        row = y[0]
        y.mul_(2.0)
        return row.sum()

    graph = capture(Function(step), torch.randn(4, 4), optimizer=None)
    (version,) = graph.made_by(ops_of(graph, "aten.mul_")[0])
    (total,) = ops_of(graph, "aten.sum")
    assert version in graph.reads_of(total)


def test_capture_batch_norm_writes_its_statistics():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    graph = capture(model, torch.randn(2, 3, 5, 5))
    names = tensors_with(graph, Role.BUFFER)
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked"} <= set(names)
    versions = np.flatnonzero((graph.tensor_role == Role.BUFFER) & (graph.tensor_producer >= 0))
    written = {graph.tensor_names[graph.alias_of[t]] for t in versions}
    assert written == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert capture(model.eval(), torch.randn(2, 3, 5, 5), optimizer=None).num_ops < graph.num_ops


# ── order, pairs, groups ─────────────────────────────────────────────────────────────────────────


def test_capture_numbers_random_draws_in_order():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4), nn.Dropout())
    graph = capture(model, torch.randn(2, 4))
    drawn = np.flatnonzero(graph.rng_order >= 0)
    assert graph.rng_order[drawn].tolist() == [0, 1]
    assert [graph.module_of(op) for op in drawn] == ["1", "3"]
    assert not np.any(capture(model.eval(), torch.randn(2, 4)).rng_order >= 0)


def test_backward_passes_of_attention_are_given_their_seed_and_draw_nothing():
    """A second wave would wait for those of the first before it draws, which is nearly its end."""

    def attended(model, rows):
        seen = model(rows)
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            seen, seen, seen, None, True, 0.1
        )[0].sum()

    graph = capture(nn.Linear(8, 8), torch.randn(2, 1, 16, 8), forward=attended)
    drawn = [graph.kind_of(op) for op in np.flatnonzero(graph.rng_order >= 0)]
    assert drawn == ["aten._scaled_dot_product_efficient_attention"]
    kinds = {graph.kind_of(op) for op in range(graph.num_ops)}
    assert "aten._scaled_dot_product_efficient_attention_backward" in kinds


def test_capture_pairs_every_backward_product_with_its_module(gpt2):
    graph = gpt2[2]
    backward = np.flatnonzero(graph.op_phase == Phase.BACKWARD)
    alone = [op for op in backward if graph.partner[op] < 0]
    assert [graph.kind_of(op) for op in alone] == ["aten.ones_like"]
    for op in backward:
        if graph.partner[op] >= 0:
            assert graph.module_of(op) == graph.module_of(int(graph.partner[op]))
    products = [op for op in backward if graph.kind_of(op) == "aten.mm"]
    partners = {graph.kind_of(int(graph.partner[op])) for op in products}
    assert partners == {"aten.mm", "aten.addmm"}


def test_capture_pairs_what_is_changed_in_place_with_the_module_that_changes_it():
    """Autograd makes the node of such a module first, and then others for copies and views."""
    model = nn.Sequential(
        nn.LayerNorm(4), nn.SiLU(inplace=True), Function(_halved), nn.Sigmoid(), nn.Linear(4, 1)
    )
    graph = capture(model, torch.randn(2, 3, 4))
    for kind, path in (("silu_backward", "1"), ("sigmoid_backward", "3")):
        (op,) = ops_of(graph, f"aten.{kind}")
        assert graph.module_of(op) == graph.module_of(int(graph.partner[op])) == path


def _halved(x, w):
    y = (x @ w).view(3, 2, 4)
    y[:, 1:].mul_(0.5)
    return y


def test_capture_groups_updates_with_the_first_use_of_a_parameter():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, bias=False))
    graph = capture(model, torch.randn(3, 4))
    (addmm,), mm = ops_of(graph, "aten.addmm"), ops_of(graph, "aten.mm")[0]
    updates = {graph.op_names[op]: graph.group[op] for op in ops_of(graph, "optimizer.adamw")}
    assert updates["0.weight/adamw"] == updates["0.bias/adamw"] == graph.group[addmm] >= 0
    assert updates["1.weight/adamw"] == graph.group[mm] >= 0
    assert graph.group[addmm] != graph.group[mm]


def test_capture_tied_weights_are_one_parameter_with_one_update():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return functional.cross_entropy(self.head(self.embed(ids)), ids)

    graph = capture(Tied(), torch.zeros(3, dtype=torch.long))
    assert graph.bytes_by_role()["parameter"] == 160
    assert graph.bytes_by_role()["gradient"] == 160
    assert len(ops_of(graph, "optimizer.adamw")) == 1


def test_capture_shared_module_keeps_its_first_path():
    layer = nn.Linear(4, 4)
    graph = capture(nn.Sequential(layer, nn.ReLU(), layer), torch.randn(2, 4))
    assert [graph.op_names[op] for op in ops_of(graph, "aten.addmm")] == ["0/addmm", "0/addmm:1"]
    assert len(ops_of(graph, "optimizer.adamw")) == 2


def test_capture_checkpointed_block_pairs_what_it_computes_again():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return checkpoint(lambda y: self.layer(y).relu(), x, use_reentrant=False).sum()

    graph = capture(Block(), torch.randn(2, 4))
    again = [op for op in ops_of(graph, "aten.addmm") if graph.op_phase[op] == Phase.BACKWARD]
    assert len(again) == 1
    assert graph.partner[again[0]] >= 0


# ── costs ────────────────────────────────────────────────────────────────────────────────────────


def test_gradients_of_grouped_convolutions_meet_their_own_channels_only():
    first = nn.Conv2d(3, 32, 1, bias=False)
    grouped = nn.Conv2d(32, 32, 7, padding=3, groups=32, bias=False)
    model = nn.Sequential(first, grouped)
    graph = capture(model, torch.randn(2, 3, 8, 8), loss=lambda out: out.sum())
    places = 2 * 2 * 8 * 8
    found = {
        name: [graph.flops[op] for op in range(graph.num_ops)
               if graph.modules[graph.op_module[op]] == name
               and "convolution" in graph.kind_of(op)]
        for name in ("0", "1")
    }  # fmt: skip
    # No gradient of the images is wanted.
    assert found["0"] == [places * first.weight.numel()] * 2
    forward = places * grouped.weight.numel()
    assert found["1"] == [forward, 2 * forward]


def test_a_parameter_that_gets_other_memory_in_the_step_keeps_its_gradient():
    """As cuDNN gives recurrent layers whose weights are not in one piece."""

    class Moved(nn.Linear):
        def forward(self, x):
            self.weight.data = self.weight.detach().clone()
            return super().forward(x).sum()

    graph = capture(Moved(4, 4), torch.randn(2, 4))
    updated = [name for name in graph.op_names if name.endswith("/adamw")]
    assert updated == ["weight/adamw", "bias/adamw"]


def test_capture_flops_of_products_and_attention():
    def step(x, w):
        y = (x @ w).view(2, 1, 8, 4)
        return functional.scaled_dot_product_attention(y, y, y).sum()

    graph = capture(Function(step), torch.randn(16, 4))
    forward = graph.op_phase == Phase.FORWARD
    product, attention = 2 * 16 * 4 * 4, 2 * (2 * 2 * 8 * 8 * 4)
    assert graph.flops[forward].sum() == product + attention
    assert graph.flops[~forward].sum() == product + attention * 5 / 2


def test_capture_bytes_touched_count_broadcasts_and_gathers_once():
    def step(x, w):
        return functional.embedding(x, w) + w[0].expand(3, 4)

    graph = capture(Function(step, 4), torch.zeros(3, dtype=torch.long), optimizer=None)
    (gather,), (add,) = ops_of(graph, "aten.embedding"), ops_of(graph, "aten.add")
    assert graph.bytes_touched[gather] == 3 * 16 + 3 * 8 + 3 * 16
    assert graph.bytes_touched[add] == 3 * 16 + 16 + 3 * 16


def test_capture_signature_tells_layouts_apart():
    graph = capture(Function(lambda x, w: (x @ w) + (x @ w.t())), torch.randn(4, 4), optimizer=None)
    first, second = ops_of(graph, "aten.mm")
    text = [graph.signatures[graph.op_signature[op]] for op in (first, second)]
    assert text[0] == "aten.mm.default(float32[4,4], float32[4,4])"
    assert text[1] == "aten.mm.default(float32[4,4], float32[4,4]{1,4})"


def test_capture_bfloat16_model_computes_in_bfloat16():
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    graph = capture(model, torch.randn(2, 4, dtype=torch.bfloat16))
    (product,) = ops_of(graph, "aten.addmm")
    assert DTYPES[graph.op_dtype[product]] == "bfloat16"
    assert graph.meta["dtype"] == "bfloat16"


def test_capture_adamw_update_touches_seven_tensors():
    graph = capture(nn.Linear(4, 4, bias=False), torch.randn(2, 4))
    (update,) = ops_of(graph, "optimizer.adamw")
    assert graph.bytes_touched[update] == 7 * 64
    assert graph.workspace_bytes[update] == 0


def test_capture_takes_the_result_of_a_tokenizer(gpt2):
    transformers = pytest.importorskip("transformers")
    model, batch, graph = gpt2
    encoded = transformers.BatchEncoding(batch)
    assert capture(model, encoded).content_hash == graph.content_hash
