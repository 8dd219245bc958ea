"""The same step at another size: two captures tell what a third one says."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from hocket.base.errors import InputFileError, UsageError
from hocket.capture.sizes import capture_sizes, resized
from hocket.graph.batches import at_batch, differing_op
from hocket.graph.files import read_graph, write_graph


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.norm = nn.BatchNorm1d(width)
        self.layers = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, 5))

    def forward(self, words, scale):
        return self.layers(self.norm(self.table(words).mean(1)) * scale)


def batch_of(num_samples):
    return {"words": torch.zeros(num_samples, 7, dtype=torch.long), "scale": torch.ones(1)}


@pytest.fixture(scope="module")
def graph():
    return capture_sizes(Net(), batch_of(8), loss="mean")


@pytest.mark.parametrize("num_samples", [2, 3, 5, 16])
def test_a_step_at_another_size_is_the_capture_of_that_size(graph, num_samples):
    seen = at_batch(graph, num_samples)
    captured = capture_sizes(Net(), batch_of(num_samples), loss="mean")
    assert differing_op(seen, captured) is None
    assert seen.content_hash == captured.content_hash


def test_a_step_at_its_own_size_stays_what_it_is(graph):
    assert at_batch(graph, 8) is graph


def test_the_first_op_that_differs_is_named_by_its_work_or_by_what_it_makes(graph):
    flops, sizes = graph.flops.copy(), graph.tensor_bytes.copy()
    flops[3] += 1e6
    assert differing_op(graph, replace(graph, flops=flops)) == graph.op_names[3]
    made = int(np.flatnonzero(graph.tensor_producer == 5)[0])
    sizes[made] += 1
    assert differing_op(graph, replace(graph, tensor_bytes=sizes)) == graph.op_names[5]


def test_one_sample_is_on_the_line_too(graph):
    one, two = at_batch(graph, 1), at_batch(graph, 2)
    assert np.all(one.tensor_bytes <= two.tensor_bytes)
    assert one.flops.sum() < two.flops.sum()
    assert np.array_equal(one.reads, graph.reads)


def test_sizes_survive_a_file_and_do_not_change_the_hash(graph, tmp_path):
    write_graph(graph, tmp_path / "g.json")
    again = read_graph(tmp_path / "g.json")
    assert at_batch(again, 3).content_hash == at_batch(graph, 3).content_hash
    assert replace(graph, other_batch=None).content_hash == graph.content_hash


def test_a_file_with_the_same_size_twice_is_refused(graph, tmp_path):
    write_graph(graph, tmp_path / "g.json")
    data = json.loads((tmp_path / "g.json").read_text())
    data["other_batch"]["other_samples"] = data["other_batch"]["samples"]
    (tmp_path / "g.json").write_text(json.dumps(data))
    with pytest.raises(InputFileError, match="same 8 samples"):
        read_graph(tmp_path / "g.json")


class Pairs(nn.Module):
    """A loss over pairs of samples: its cost grows with the square of the batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        y = self.layer(x)
        return (y @ y.t()).logsumexp(1).mean()


def test_a_step_in_which_samples_meet_is_not_split():
    graph = capture_sizes(Pairs(), torch.zeros(8, 6))
    assert graph.other_batch is None
    assert "does not grow evenly" in graph.meta["unsplit"]
    with pytest.raises(UsageError, match="does not say what grows"):
        at_batch(graph, 4)


def test_a_single_sample_is_not_split():
    assert capture_sizes(nn.Linear(3, 2), torch.zeros(1, 3), loss="mean").other_batch is None


def test_resizing_leaves_tensors_without_samples_alone():
    small = resized(batch_of(8), 3)
    assert small["words"].shape == (3, 7)
    assert small["scale"].shape == (1,)


def test_inputs_that_are_the_labels_stay_one_tensor():
    words = torch.zeros(4, 3, dtype=torch.long)
    seen = resized({"input_ids": words, "labels": words}, 6)
    assert seen["labels"] is seen["input_ids"]
    assert seen["labels"].shape == (6, 3)
