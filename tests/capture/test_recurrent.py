"""Recurrent layers on fake tensors: both passes give what the real ones do, by shape."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.capture.fake import fake_mode, fake_twins, flat_weights, lay_apart
from hocket.capture.model import capture, capture_program
from hocket.capture.recurrent import know_recurrent_layers, stand_in_recurrence
from hocket.graph.graph import Phase

MODES = {"LSTM": 2, "GRU": 3}


@pytest.mark.parametrize("name", MODES)
def test_gradients_of_a_recurrent_layer_have_the_shapes_of_what_they_are_of(name):
    know_recurrent_layers()
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer = getattr(torch.nn, name)(5, 7, num_layers=2, batch_first=True, bidirectional=True)
        weights = layer._flat_weights
        x = torch.randn(3, 4, 5, requires_grad=True)
        states = [torch.randn(4, 3, 7, requires_grad=True) for _ in range(2)]
        cell = states[1] if name == "LSTM" else None
        output, last, _, reserve, buffer = torch._cudnn_rnn(
            x, weights, 4, None, states[0], cell, MODES[name], 7, 0, 2, True, 0.0, True, True, [],
            None,
        )  # fmt: skip
        wanted = [x, states[0], *weights]
        found = torch.autograd.grad(output.sum() + last.sum(), wanted)
    assert output.shape == (3, 4, 14)
    # Samples first is a view of steps first, as cuDNN writes it: who flattens it has to copy.
    assert output.stride() == (14, 3 * 14, 1)
    assert found[0].stride() == (5, 3 * 5, 1)
    assert last.shape == (4, 3, 7)
    assert [gradient.shape for gradient in found] == [tensor.shape for tensor in wanted]
    assert reserve.numel() > 0
    assert buffer.numel() == sum(weight.numel() for weight in weights)


def _results_of_processor(mode):
    """Layouts of what oneDNN's ops give for a layer, and which of them are one storage."""
    found = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            results = func(*args, **(kwargs or {}))
            if "mkldnn_rnn_layer" in str(func):
                storages = [result.untyped_storage() for result in results]
                places = [each._cdata for each in storages]
                found.append([
                    (result.shape, result.stride(), storage.nbytes(), places.index(storage._cdata))
                    for result, storage in zip(results, storages, strict=True)
                ])  # fmt: skip
            return results

    with mode:
        layer = torch.nn.LSTM(5, 7, num_layers=2, bidirectional=True, batch_first=True)
        x = torch.randn(3, 4, 5, requires_grad=True)
        with Seen():
            layer(x)[0].sum().backward()
    return found


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_a_layer_of_a_processor_keeps_as_much_without_memory_as_with_it():
    layer = torch.nn.LSTM(5, 7)
    real = _results_of_processor(nullcontext())
    assert len(real) == 8
    assert real[0][-1][2] > 0
    assert _results_of_processor(fake_mode(layer)) == real
    with stand_in_recurrence():
        stands_in = _results_of_processor(fake_mode(layer))
    # Of each of seven units an accelerator keeps six values a step.
    assert [results[-1][2] for results in stands_in[:4]] == [3 * 4 * 7 * 6 * 4] * 4


def test_all_that_a_library_runs_in_one_call_shares_a_device():
    net = torch.nn.ModuleDict({"head": torch.nn.Linear(5, 5), "words": torch.nn.GRU(5, 7)})

    def forward(net, rows):
        return net["words"](net["head"](rows))[0].mean()

    graph = capture(net, torch.randn(3, 2, 5), forward=forward)
    inside = (graph.op_module == graph.modules.index("words")) & (graph.op_phase != Phase.OPTIMIZER)
    assert inside.sum() > 20
    (group,) = set(graph.group[inside].tolist())
    assert group >= 0
    assert group not in graph.group[graph.op_module == graph.modules.index("head")]


def test_a_recurrent_layer_is_recorded_the_same_each_time():
    layer, batch = torch.nn.LSTM(5, 7, num_layers=2, dropout=0.1), torch.randn(3, 2, 5)
    kept = {"forward": lambda layer, rows: layer(rows)[0].mean()}
    first, again = (capture_program(layer, batch, **kept)[0] for _ in range(2))
    assert first.op_names == again.op_names


class LooksAtStorage(torch.nn.Module):
    """As cuDNN's layers find out whether their weights are one buffer."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(6))

    def forward(self, rows):
        buffer = torch.empty(0).set_(self.weight.detach().untyped_storage())
        return (rows * self.weight).mean() + buffer[:3].sum()


def test_a_look_at_a_storage_is_a_view_of_what_lies_there():
    graph, _ = capture_program(LooksAtStorage(), torch.randn(3, 6))
    assert not any("set_" in graph.kind_of(op) for op in range(graph.num_ops))
    assert all(text.isprintable() for text in graph.signatures)
    looked = [op for op in range(graph.num_ops) if "slice" in graph.kind_of(op)]
    weight = next(t for t in range(graph.num_tensors) if graph.tensor_names[t] == "weight")
    read = graph.reads[graph.read_ptr[looked[0]] : graph.read_ptr[looked[0] + 1]]
    assert graph.root_of[read].tolist() == [weight]


def test_weights_of_a_recurrent_layer_lie_in_one_piece_where_asked_for():
    """As a model that came to a GPU has them: cuDNN then needs no copy of them in one buffer."""
    net = torch.nn.ModuleList([torch.nn.LSTM(5, 7, num_layers=2), torch.nn.Linear(7, 3)])
    tensors = [*net.parameters()]
    with FakeTensorMode():
        twins = fake_twins(tensors, "cpu", flat_weights(net))
        apart = fake_twins(tensors, "cpu")
    layer = [*net[0].parameters()]
    (storage,) = {twins[id(t)].untyped_storage()._cdata for t in layer}
    first = twins[id(layer[0])].untyped_storage()
    assert first.nbytes() == 4 * sum(t.numel() for t in layer)
    places = sorted((twins[id(t)].storage_offset(), t.dim(), t.numel()) for t in layer)
    # One behind the other, biases behind all matrices.
    assert [at for at, *_ in places] == [sum(n for *_, n in places[:i]) for i in range(len(places))]
    assert [dim for _, dim, _ in places] == [2] * 4 + [1] * 4
    for t in tensors:
        assert twins[id(t)].shape == t.shape
        assert isinstance(twins[id(t)], torch.nn.Parameter)
    assert storage not in {twins[id(t)].untyped_storage()._cdata for t in net[1].parameters()}
    assert len({apart[id(t)].untyped_storage()._cdata for t in tensors}) == len(tensors)
    # What shares memory with something else stays where it is.
    net[1].weight = net[0].weight_hh_l0
    net[0]._flat_weights[1].data = net[0].weight_ih_l0.data.view(-1)[:28].view(4, 7)
    with FakeTensorMode():
        tied = fake_twins([*net.parameters()], "cpu", flat_weights(net))
    assert len({tied[id(t)].untyped_storage()._cdata for t in layer}) == len(layer) - 1


def test_weights_that_are_laid_apart_share_no_storage_and_keep_their_numbers():
    net = torch.nn.ModuleList([torch.nn.LSTM(5, 7), torch.nn.Linear(7, 3)])
    row = list(net[0].parameters())
    flat = torch.cat([weight.detach().reshape(-1) for weight in row])
    for weight, part in zip(row, flat.split([weight.numel() for weight in row]), strict=True):
        weight.data = part.view(weight.shape)
    before, other = [weight.clone() for weight in row], net[1].weight.data_ptr()
    lay_apart(net)
    assert len({weight.untyped_storage()._cdata for weight in row}) == len(row)
    assert all(map(torch.equal, before, row))
    assert net[1].weight.data_ptr() == other
