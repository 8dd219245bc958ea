"""What captured steps share: when another capture is needed, the batch that they read, a stream."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from hocket.runtime.replay import StaticBatch, model_key, on_stream

CPU = torch.device("cpu")


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))


def _moved(model):
    model[0].weight.data = model[0].weight.data.clone()


def _replaced(model):
    model[0].bias = nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[2].eval(),
        lambda model: model[0].weight.requires_grad_(False),
        lambda model: setattr(model[1], "running_mean", torch.zeros(4)),
        _moved,
        _replaced,
    ],
)
def test_what_a_graph_would_not_notice_changes_the_key(model, change):
    before = model_key(model, CPU)
    assert model_key(model, CPU) == before
    with torch.no_grad():
        model[0].weight.add_(1)
    assert model_key(model, CPU) == before
    kept = [*model.parameters(), *model.buffers()]  # so that no address is given out again
    change(model)
    assert model_key(model, CPU) != before
    del kept


def test_precisions_of_autocast_are_different_keys(model):
    keys = [model_key(model, CPU)]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            keys.append(model_key(model, CPU))
    assert len(set(keys)) == 3
    assert model_key(model, CPU) == keys[0]


def test_later_batches_are_read_from_the_memory_of_the_first():
    given = {"rows": torch.ones(2), "more": [torch.zeros(1), 3]}
    static = StaticBatch(given)
    own = static.batch["rows"], static.batch["more"][0]
    static.refill({"rows": torch.full((2,), 5.0), "more": [torch.full((1,), 7.0), 3]})
    assert static.batch["rows"] is own[0]
    assert [each.tolist() for each in own] == [[5.0, 5.0], [7.0]]
    assert given["rows"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="shorter"):
        static.refill({"rows": torch.ones(2), "more": [torch.zeros(1)]})


class Stream:
    """What stands for a CUDA stream."""

    def __init__(self, name, log):
        self.name, self._log = name, log

    def wait_stream(self, other):
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("fails", [False, True])
def test_what_runs_beside_comes_after_all_before_and_before_all_after(monkeypatch, fails):
    log = []
    usual, aside = Stream("usual", log), Stream("aside", log)

    @contextmanager
    def entered(stream):
        log.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: usual)
    monkeypatch.setattr(torch.cuda, "stream", entered)

    def work():
        with on_stream(aside, CPU):
            log.append("work")
            if fails:
                raise KeyError("no such kernel")

    if fails:
        with pytest.raises(KeyError):
            work()
    else:
        work()
    assert log == ["aside waits for usual", "on aside", "work", "usual waits for aside"]


def test_without_a_stream_nothing_waits(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "current_stream", asked.append)
    monkeypatch.setattr(torch.cuda, "stream", asked.append)
    with on_stream(None, CPU):
        asked.append("work")
    assert asked == ["work"]
