"""``hocket fit --max`` as it is typed: the largest batch, sequence or depth that fits."""

from __future__ import annotations

import json
from functools import partial

import pytest
from click.testing import CliRunner
from planners.memory.steps import MIB, chain_step

import hocket
from hocket.api.memory import largest_that_fits
from hocket.base.errors import UsageError
from hocket.base.units import format_bytes, typed_bytes
from hocket.cli import fit
from hocket.cli.root import root
from hocket.plan.files import read_plan
from hocket.plan.make import make_problem


def run(*arguments):
    return CliRunner().invoke(root, list(map(str, arguments)))


def on_h200(step_of):
    return lambda size: make_problem(step_of(size), "1xh200")


def test_the_largest_size_fits_and_the_next_does_not():
    def wide(size):
        return chain_step(3, activation=size * MIB, weight=1 * MIB)

    found, problem = largest_that_fits(on_h200(wide), 200 * MIB, start=4, most=4096)
    assert problem.graph.content_hash == wide(found).content_hash
    assert hocket.fit(wide(found), "1xh200", "200MiB").chosen is not None
    assert hocket.fit(wide(found + 1), "1xh200", 200 * MIB).chosen is None


def test_the_largest_size_keeps_to_what_may_wait_on_the_host():
    host_bytes = 10 * MIB

    def wide(size):
        return chain_step(2, activation=size * MIB, weight=4 * MIB)

    fit = partial(hocket.fit, on="1xh200", memory=200 * MIB, host_bytes=host_bytes)
    found, _ = largest_that_fits(
        on_h200(wide), 200 * MIB, start=4, most=4096, host_bytes=host_bytes
    )
    anywhere, _ = largest_that_fits(on_h200(wide), 200 * MIB, start=4, most=4096)
    assert found < anywhere
    assert fit(wide(found)).chosen is not None
    assert fit(wide(found + 1)).chosen is None


def test_max_captures_each_size_once_and_tells_what_it_found(tmp_path):
    """Layers that are used twice stay on the device."""
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\n"
        "import torch\n"
        "def build(layers=1):\n"
        "    with Path(__file__).with_name('calls').open('a') as calls:\n"
        "        calls.write(f'{layers}\\n')\n"
        "    once = [torch.nn.Linear(64, 64) for _ in range(layers)]\n"
        "    return torch.nn.Sequential(*once, *once), torch.randn(4, 64)\n"
    )
    own, plan = f"{tmp_path}/own.py:build", tmp_path / "plan.json"
    result = run(
        "fit", own, "--on", "1xh200", "--memory", "1MiB", "--max", "layers", "--loss", "mean",
        "-o", plan, "--json",
    )  # fmt: skip
    assert result.exception is None, result.exception
    answer = json.loads(result.stdout)
    found = answer["max_layers"]
    tried = [int(line) for line in (tmp_path / "calls").read_text().split()]
    assert len(tried) == len(set(tried)) <= 7
    assert {found, found + 1} <= set(tried)
    assert f"layers {found} fits: {format_bytes(answer['smallest_budget_bytes'])}" in result.stderr
    assert f"layers {found + 1} does not fit: " in result.stderr
    assert answer["feasible"]
    assert read_plan(plan).problem.graph.content_hash == answer["graph"]["hash"]


def test_what_does_not_grow_is_told():
    with pytest.raises(UsageError, match="is the same for each size"):
        largest_that_fits(on_h200(lambda _: chain_step(3)), 2**36, start=1, most=64)


def test_the_largest_size_and_that_no_larger_one_is_tried_are_said_before_planning(
    tmp_path, monkeypatch
):
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def build(layers=1):\n"
        "    layers = [torch.nn.Linear(8, 8) for _ in range(layers)]\n"
        "    return torch.nn.Sequential(*layers), torch.randn(2, 8)\n"
    )

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setitem(fit.MOST, "layers", 6)
    monkeypatch.setattr("hocket.api.memory.fit_problem", interrupt)
    result = run("fit", f"{tmp_path}/own.py:build", "--on", "1xh200", "--memory", "1GiB",
                 "--loss", "mean", "--max", "layers")  # fmt: skip
    assert "the largest layers that fits is 6, and no larger one is tried" in result.stderr


def test_where_not_even_the_smallest_size_fits_what_would_do_is_told(tmp_path):
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def build(batch=8):\n"
        "    return torch.nn.Linear(256, 256), torch.randn(batch, 256)\n"
    )
    told = ("fit", f"{tmp_path}/own.py:build", "--on", "1xh200", "--loss", "mean", "--max", "batch")
    result = run(*told, "--memory", "100KiB", "--json")
    assert result.exit_code == 4
    answer = json.loads(result.stdout)
    enough = answer["smallest_budget_bytes"]
    assert answer["feasible"] is False
    assert answer["budget_bytes"] == 100 * 2**10
    assert f"batch 1 does not fit: {format_bytes(enough)}" in result.stderr
    for part in (format_bytes(enough), "not even batch 1 fits into 100.0 KiB"):
        assert part in answer["error"]["message"]
    assert typed_bytes(enough) in answer["error"]["hint"]
    found = json.loads(run(*told, "--memory", f"{enough}B", "--json").stdout)
    assert found["max_batch"] >= 1
