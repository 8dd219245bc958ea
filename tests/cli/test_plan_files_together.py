"""Files that belong together: written all or none, never over the other kind, found again."""

import json
import os
from pathlib import Path

import pytest
from cli.terminal import hocket

from hocket.base import atomic
from hocket.base.errors import UsageError
from hocket.graph.files import write_graph
from hocket.graph.generators import generate

ON = ("--on", "2xv100-16g", "--planner", "m-topo")


@pytest.fixture
def folder(tmp_path):
    write_graph(generate("chain", 12, 0), tmp_path / "g.json")
    return tmp_path


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("command", "num_fitting"),
    [
        (["plan", "g.json", *ON], 2),
        (["fit", "g.json", "--on", "1xt4", "--memory", "1GiB"], 1),
        (["collective", "allreduce", "--on", "2xt4", "-o", "c.json", "--report", "c.html"], 1),
    ],
    ids=["plan", "fit", "collective"],
)
def test_a_full_disk_changes_no_file(folder, monkeypatch, command, num_fitting):
    hocket(*command, cwd=folder)
    before = content(folder)
    write_graph(generate("chain", 13, 0), folder / "g.json")
    before["g.json"] = (folder / "g.json").read_bytes()
    synced = []

    def full(descriptor):
        synced.append(descriptor)
        if len(synced) > num_fitting:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    refused = hocket(*command, cwd=folder, expect=2)
    assert "No space left on device" in refused.stderr
    assert content(folder) == before


def test_files_are_replaced_together_or_not_at_all(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(UsageError, match="cannot write"):
        atomic.write_together({tmp_path / "a": b"new", tmp_path / "none" / "b": b"new"})
    assert content(tmp_path) == {"a": b"old"}
    atomic.write_together({tmp_path / "a": b"new", tmp_path / "b": b"too"})
    assert content(tmp_path) == {"a": b"new", "b": b"too"}


def _graph(path):
    return json.loads(path.read_text())["problem"]["work"]["graph"]


def test_a_small_graph_travels_inside_and_a_large_one_is_found_again(folder, monkeypatch):
    hocket("plan", "g.json", *ON, cwd=folder)
    assert "inline" in _graph(folder / "plan.json")
    monkeypatch.setattr("hocket.cli.written.MAX_EMBEDDED_OPS", 5)
    (folder / "data").mkdir()
    (folder / "g.json").rename(folder / "data" / "g.json")
    hocket("plan", "data/g.json", *ON, "-o", "p.json", cwd=folder)
    assert _graph(folder / "p.json")["file"] == "data/g.json"
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (folder / "p.json").rename(elsewhere / "p.json")
    hocket("show", "elsewhere/p.json", cwd=folder, expect=3)
    (elsewhere / "g.json").write_bytes((folder / "data" / "g.json").read_bytes())
    hocket("show", "elsewhere/p.json", cwd=folder)
    write_graph(generate("chain", 13, 0), elsewhere / "g.json")  # another graph of that name
    lost = hocket("show", "elsewhere/p.json", cwd=folder, expect=3)
    assert "--graph" in lost.stderr
    assert Path("data/g.json").name in lost.stderr
