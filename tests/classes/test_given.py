"""Nets and data as users give them, and what is said of those that cannot be split."""

import numpy as np
import pytest
import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.classes.data import splits_from
from hocket.classes.exported import as_onnx
from hocket.classes.material import prepared
from hocket.classes.settings import SplitRequest
from hocket.classes.steps import Steps

ZEROS = np.zeros((20, 2), np.float32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "not inputs and labels"),
        ((np.zeros((4, 2), np.float32), np.zeros(3, int)), "4 inputs and 3 labels"),
        ((np.full((4, 2), np.nan, np.float32), np.arange(4)), "no finite numbers"),
        ({"train": (np.zeros((4, 2), np.float32), np.arange(4)), "tset": 1}, "unknown key 'tset'"),
        ({"train": (np.zeros((4, 2)), np.arange(4)), "names": ["a"]}, "labels up to 3 and 1 names"),
        ((ZEROS, np.array(["cat", "dog"] * 10)), "no array of numbers"),
        ((ZEROS, np.arange(20) % 2 + 0.5), "labels that are no whole numbers"),
        ((ZEROS, np.eye(2)[np.arange(20) % 2]), "20 inputs and 40 labels"),
        ((ZEROS[:4], np.arange(4) % 4), "leaves nothing for the validation split"),
        ({"train": (ZEROS, np.arange(20) % 2), "test": (ZEROS, np.arange(20))}, "up to 19 in test"),
    ],
)
def test_wrong_data_is_told(given, message):
    with pytest.raises(UsageError, match=message):
        splits_from(given, "data.py:images")


def test_data_is_divided_with_every_class_in_every_split():
    splits = splits_from((np.random.rand(100, 3), np.arange(100) % 5), "data.py:images")
    sizes = [len(each.labels) for each in (splits.train, splits.validation, splits.test)]
    assert sizes == [60, 20, 20]
    for each in (splits.train, splits.validation, splits.test):
        assert np.bincount(each.labels.numpy()).min() == len(each.labels) // 5


NETS = """
import numpy as np
import torch
from torch import nn

def images():
    return np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32), np.arange(60) % 3

def bytes_():
    return np.zeros((60, 4), np.uint8), np.arange(60) % 3

class Net(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.hidden, self.head, self.end = nn.Linear(4, 16), nn.Linear(16, 3), end
        self.weights = nn.Parameter(torch.ones(3))

    def forward(self, inputs):
        scores = self.head(self.hidden(inputs).relu())
        if self.end == "weights":
            return scores * self.weights
        return getattr(scores, self.end)(1) if self.end else scores

def plain():
    return Net("")

def logarithms():
    return Net("log_softmax")

def shares():
    return Net("softmax")

def weighted():
    return Net("weights")

def frozen():
    return Net("").requires_grad_(False)
"""


def material(folder, net, data="images"):
    source = folder / "given.py"
    source.write_text(NETS)
    request = SplitRequest(net=f"{source}:{net}", data=f"{source}:{data}")
    return prepared(request, Steps(folder / "work"), lambda *_: None)


@pytest.mark.parametrize("net", ["plain", "logarithms", "frozen"])
def test_nets_whose_scores_are_of_their_last_layer_are_taken(tmp_path, net):
    assert material(tmp_path, net).structure.head == "head"


@pytest.mark.parametrize("net", ["shares", "weighted"])
def test_what_is_done_to_scores_after_the_last_layer_is_refused(tmp_path, net):
    with pytest.raises(UsageError, match="not what its last linear layer 'head' gives"):
        material(tmp_path, net)


def test_bytes_of_images_are_not_tokens(tmp_path):
    with pytest.raises(UsageError, match="the net fails") as told:
        material(tmp_path, "plain", "bytes_")
    assert "give images as floats" in told.value.hint


def test_a_net_that_onnx_cannot_hold_is_told_in_one_line():
    class Spectrum(nn.Module):
        def forward(self, inputs):
            return torch.linalg.eigvals(inputs).real

    with pytest.raises(UsageError, match="cannot be written as ONNX") as told:
        as_onnx(Spectrum(), torch.eye(2)[None])
    assert "\n" not in told.value.message


def test_a_file_where_the_folder_should_be_is_told(tmp_path):
    (tmp_path / "parts").write_text("mine")
    with pytest.raises(UsageError, match="cannot make the folder: Not a directory"):
        Steps(tmp_path / "parts" / "work")
    assert (tmp_path / "parts").read_text() == "mine"
