"""A run that has no room is refused before it starts, with the part of it that has."""

import json

import pytest
import torch
from cli.terminal import hocket
from torch import nn

from hocket.api.planned import plan_graph
from hocket.base.errors import UsageError
from hocket.capture import capture
from hocket.runtime import run_limits


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    def forward(self, x):
        return self.layers(x).square().mean()


@pytest.fixture(scope="module")
def planned():
    graph = capture(Wide(), torch.zeros(4096, 64), name="wide", device="cpu")
    return plan_graph(graph, "2xcpu-core", planners="layer-blocks")


def needed_bytes(planned):
    graph, peaks = planned.problem.graph, planned.timeline.peak_bytes
    weights = sum(size for role, size in graph.bytes_by_role().items() if role == "parameter")
    return int(peaks.sum()) + weights + 3 * run_limits.PROCESS_BYTES


def refusal(planned, free_bytes, monkeypatch):
    monkeypatch.setattr(run_limits, "available_bytes", lambda: free_bytes)
    places = dict.fromkeys(range(2), "cpu")
    run_limits.require_memory_here(planned.problem, planned.timeline, places, num_processes=3)


def test_a_run_may_take_all_that_is_free_and_not_a_byte_more(planned, monkeypatch):
    needed = needed_bytes(planned)
    refusal(planned, needed, monkeypatch)
    with pytest.raises(UsageError, match=r"running wide here takes .* on cpu, and .* are free"):
        refusal(planned, needed - 1, monkeypatch)


def test_the_command_refuses_before_it_builds_the_model(tmp_path, monkeypatch):
    (tmp_path / "m.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make(batch=4):\n"
        "    if batch != 4: raise AssertionError('built')\n"
        "    return nn.Linear(8, 8), torch.zeros(batch, 8)\n"
    )
    on = ["--on", "1xcpu-core", "--planner", "one-device", "--loss", "mse"]
    hocket("plan", "m.py:make", *on, cwd=tmp_path)
    (tmp_path / "m.py").write_text("def make(): raise AssertionError('built')\n")
    monkeypatch.setattr(run_limits, "available_bytes", lambda: 1)
    refused = hocket("run", "plan.json", "--json", cwd=tmp_path, expect=2)
    assert "are free" in json.loads(refused.stdout)["error"]["message"]
