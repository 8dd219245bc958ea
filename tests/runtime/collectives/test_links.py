"""Ranks in namespaces whose cables slow down and vanish while they train."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime.collectives.ranks import HERE, started


def _testbed() -> Any:
    path = Path(__file__).parents[3] / "benchmarks/testbed.py"
    spec = importlib.util.spec_from_file_location("testbed", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["testbed"] = module
    spec.loader.exec_module(module)
    return module


def _why_not() -> str:
    """Why there can be no namespaces here; empty where there can."""
    name = f"hocket-try-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    except OSError as error:
        return f"needs iproute2: {error}"
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"needs root and network namespaces: {made.stderr.strip()}" if made.returncode else ""


WHY_NOT = _why_not()


def _expected(num_steps: int, count: int) -> list[float]:
    """What the program computes, each sum rounded once."""
    parameter, found = np.zeros(400_000, dtype=np.float32), []
    for number in range(num_steps):
        draws = [np.random.default_rng(1000 * number + rank) for rank in range(count)]
        total = sum(draw.standard_normal(400_000, dtype=np.float32).astype(np.float64)
                    for draw in draws)  # fmt: skip
        parameter = np.float32(0.9) * parameter + total.astype(np.float32)
        found.append(float(parameter[::1000].astype(np.float64).sum()))
    return found


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "namespaces work")
def test_a_cable_that_slows_down_or_is_cut_is_planned_around_and_no_bit_changes() -> None:
    testbed = _testbed()
    names = [f"r{n}" for n in range(4)]
    shape = testbed.Shape(20e6, burst_bytes=100_000)
    slow = testbed.Shape(5e6, burst_bytes=100_000)
    ring = {(a, b): shape for a, b in zip(names, [*names[1:], names[0]], strict=True)}
    with testbed.Testbed(dict.fromkeys(names, slow), ring) as bed:

        def start(rank: int, command: list[str], **options: Any) -> Any:
            return bed.start(names[rank], command, **options)

        more = {"GLOO_SOCKET_IFNAME": "eth0", "HOCKET_WIDE_SUMS": "1"}
        with started([HERE, "training", "0", "1000"], 4, start, bed.address("r0"), **more) as ranks:
            lines = _until(ranks, lambda plans, step: step >= 3)
            bed.shape("r0", "r1", slow)
            lines += _until(ranks, lambda plans, step: plans >= 1)
            bed.cut("r2", "r3")
            lines += _until(ranks, lambda plans, step: plans >= 2)
            lines += _until(ranks, lambda plans, step: step >= 3 + len(lines))
    sums = [float(line.split()[2]) for line in lines]
    assert sums == _expected(len(sums), 4)


def _until(ranks: list[Any], is_enough: Any) -> list[str]:
    """Lines of the first rank up to the one with which it is enough."""
    found: list[str] = []
    for line in ranks[0].stdout:
        found.append(line)
        _, step, _, plans, _ = line.split()
        if is_enough(int(plans), int(step)):
            return found
    raise AssertionError(ranks[0].stderr.read()[-3000:])
