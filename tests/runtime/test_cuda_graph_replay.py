"""Warm-up, capture and replay of CUDA graphs follow one rule, which a training reports."""

import pytest
import torch
from torch import nn

import hocket
from hocket.runtime.replay import NUM_WARM, REPLAYED, GraphReplay, Same


def run(repeats, keys, capture=lambda: "graph"):
    return [repeats.find(key, capture) for key in keys]


def test_a_step_is_captured_once_it_repeats_and_another_begins_anew():
    repeats, captured = GraphReplay(), []
    keys = ["a"] * 4 + ["b"] * 4 + ["a"]
    found = run(repeats, keys, lambda: captured.append(1) or len(captured))
    assert found == [None] * NUM_WARM + [1, 1] + [None] * NUM_WARM + [2, 2] + [None]
    assert repeats.captured is None
    assert repeats.message == "eager: 1 more step before the capture"
    run(repeats, "aa")
    assert repeats.message == REPLAYED


def test_what_cannot_be_captured_goes_on_and_says_why():
    def refuse():
        raise RuntimeError("no graphs here\nand more")

    repeats = GraphReplay()
    assert run(repeats, "aaaa", refuse) == [None] * 4
    assert repeats.message == "eager: RuntimeError: no graphs here"
    assert run(GraphReplay("draws"), "aaaa") == [None] * 4


def test_keys_of_objects_are_the_objects_themselves():
    one, other = [torch.zeros(2)], [torch.zeros(2)]
    assert Same(one) == Same(one) != Same(other)
    assert run(GraphReplay(), [Same(one)] * 2 + [Same(other)] * 3)[2:] == [None, None, "graph"]


@pytest.mark.parametrize("options", [{}, {"compiled": "eager"}])
def test_a_training_tells_how_steps_are_launched(options):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, 2)
    train = hocket.prepare(
        model, optimizer, batch, loss=lambda output: output.sum(), on="1xcpu-core", **options
    )
    train.step(batch)
    assert train.replays.startswith("eager: CUDA graphs need a CUDA device")
