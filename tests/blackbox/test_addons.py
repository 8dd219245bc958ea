"""Loops, tables, and classifiers that are split by class and served."""

from __future__ import annotations

import contextlib
import io
import threading
from pathlib import Path

import numpy as np
import pytest
from blackbox.command import hocket

import hocket as package
from hocket.tables import TableSpec, local_tables


def scaled(x, y):
    for i in range(len(x)):
        y[i] = 2.0 * x[i] + y[i]


def total(x):
    found = 0
    for i in range(len(x)):
        found += x[i]
    return found


def prefix(x):
    for i in range(1, len(x)):
        x[i] = x[i - 1] + x[i]


def factors(rows, cols, values, left, right):
    for k in range(len(values)):
        i, j = rows[k], cols[k]
        error = values[k] - left[i] * right[j]
        left[i] += 0.01 * error * right[j]
        right[j] += 0.01 * error * left[i]


def test_independent_iterations_give_the_result_of_the_plain_loop():
    x, ours, plain = np.arange(100.0), np.ones(100), np.ones(100)
    package.parallel_for(workers=2)(scaled)(x, ours)
    scaled(x, plain)
    np.testing.assert_array_equal(ours, plain)


def test_sums_and_dependent_iterations_are_exact():
    x = np.arange(1000)
    assert package.parallel_for(workers=2)(total)(x) == total(x)
    ours, plain = x.copy(), x.copy()
    package.parallel_for(workers=2)(prefix)(ours)
    prefix(plain)
    np.testing.assert_array_equal(ours, plain)


def test_matrix_factorisation_equals_a_serial_order_of_its_tiles():
    draws = np.random.default_rng(0)
    rows, cols = draws.integers(0, 40, 300), draws.integers(0, 40, 300)
    data = (rows, cols, draws.random(300))
    ours, in_turn = ((np.ones(40), np.ones(40)) for _ in range(2))
    package.parallel_for(workers=2)(factors)(*data, *ours)
    package.parallel_for(workers=2, backend="in-turn")(factors)(*data, *in_turn)
    np.testing.assert_array_equal(ours, in_turn)


def test_a_loop_is_explained(tmp_path):
    (tmp_path / "loops.py").write_text(
        "def scaled(x, y):\n    for i in range(len(x)):\n        y[i] = 2.0 * x[i]\n"
    )
    ended = hocket("loop", "explain", "loops.py:scaled", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert "independent" in ended.stdout


def test_the_protocol_of_tables_holds_in_random_schedules():
    ended = hocket("tables", "check", "--schedules", 50, "--json")
    assert ended.code == 0, ended.stderr
    assert ended.data["faults"] == 0


@pytest.mark.parametrize("staleness", [0, 2])
def test_reads_hold_all_changes_older_than_the_staleness(staleness):
    spec = TableSpec("counts", 3, 2, staleness=staleness)
    least = []
    with local_tables([spec], num_shards=2, num_clients=2) as group:

        def work(worker):
            for clock in range(5):
                seen = worker["counts"].get(np.arange(3))
                least.append(seen.min() - 2 * max(0, clock - staleness))
                worker["counts"].inc(np.arange(3), np.ones((3, 2), np.float32))
                worker.clock()

        threads = [threading.Thread(target=work, args=(worker,)) for worker in group.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(least) == 10
        assert min(least) >= 0


NET = """
import numpy as np, torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

def data():
    draws = np.random.default_rng(0)
    labels = draws.integers(0, 4, 400)
    inputs = draws.normal(size=(400, 1, 4, 4)).astype(np.float32)
    inputs.reshape(400, 16)[np.arange(400), 4 * labels] += 4
    return inputs, labels
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    (folder / "small.py").write_text(NET)
    ended = hocket("split", "small.py:net", "--data", "small.py:data", "--parts", 2, "--train", 60,
                   "--retrain", 20, "--rounds", 0, "--accuracy-loss", 30, "-o", "parts", "--json",
                   cwd=folder)  # fmt: skip
    assert ended.code == 0, ended.stderr
    return ended.data, folder / "parts"


def test_a_split_classifier_keeps_its_accuracy(parts):
    _, folder = parts
    assert {path.suffix for path in Path(folder).iterdir()} >= {".json", ".onnx"}


def test_serving_is_predicted(parts):
    _, folder = parts
    with contextlib.redirect_stdout(io.StringIO()):
        ended = hocket("serve-classes", folder, "--predict", "--json")
    assert ended.code == 0, ended.stderr
    assert ended.data
