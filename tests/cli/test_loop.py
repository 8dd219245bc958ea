"""``hocket loop explain``: what it says, what it refuses, and that it runs nothing of the file."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from hocket.base.errors import HocketError
from hocket.cli.root import root

PROGRAM = """
raise SystemExit("the file was run")

def epoch(u, i, v, W, H, lr):
    for n in range(len(v)):
        w = W[u[n]]
        h = H[i[n]]
        e = v[n] - w @ h
        w += lr * e * h
        h += lr * e * w

def carried(x):
    s = 0.0
    for n in range(len(x)):
        s = 0.5 * s + x[n]
        x[n] = s

def count(keys, out):
    for n in range(len(keys)):
        out[keys[n]] += 1
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def run(*arguments):
    result = CliRunner().invoke(root, ["loop", "explain", *map(str, arguments)])
    if isinstance(result.exception, HocketError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_loop_is_explained_from_its_source(program):
    found = json.loads(run(f"{program}:epoch", "--json"))
    (loop,) = found["loops"]
    assert loop["schedule"] == "rotation"
    assert {each["vector"] for each in loop["vectors"]} == {"(*, *, 0)", "(*, 0, *)"}
    assert "2-D rotation" in run(f"{program}:epoch")


def test_with_data_sizes_and_times_are_known(program, tmp_path):
    rng = np.random.default_rng(0)
    data = tmp_path / "data.npz"
    np.savez(
        data, u=rng.integers(0, 60, 50_000), i=rng.integers(0, 40, 50_000), v=rng.random(50_000),
        W=rng.random((60, 32)), H=rng.random((40, 32)), lr=0.1,
    )  # fmt: skip
    found = json.loads(run(f"{program}:epoch", "--data", data, "--workers", 3, "--json"))
    (loop,) = found["loops"]
    assert loop["tiles"] == 9
    assert loop["iterations"] == 50_000
    assert 1 <= loop["imbalance"] < 1.3


def test_what_iterations_share_is_named_beside_the_schedule(program):
    text = run(f"{program}:count")
    assert "independent but for out, see below" in text
    assert "no two iterations meet" not in text
    assert "out: summed per worker" in text


@pytest.mark.parametrize("n", [2**62, 2**40])
def test_a_loop_too_long_to_count_stays_as_it_is(program, tmp_path, n):
    path = tmp_path / "long.py"
    path.write_text("def longest(x, n):\n    for i in range(n):\n        x[i] = 0\n")
    np.savez(tmp_path / "data.npz", x=np.zeros(3), n=n)
    text = run(f"{path}:longest", "--data", tmp_path / "data.npz")
    assert "the range at line 2 is longer than 2,147,483,648" in text


def test_a_refusal_names_its_lines(program):
    text = run(f"{program}:carried")
    assert (
        "s is carried from one iteration to the next: read at line 15, written at line 15" in text
    )


def test_wrong_names_and_files_are_explained(program, tmp_path):
    with pytest.raises(HocketError, match="did you mean 'epoch'"):
        run(f"{program}:epochs")
    with pytest.raises(HocketError, match="names no function"):
        run(program)
    with pytest.raises(HocketError, match="cannot be read"):
        run(f"{tmp_path}/none.py:f")
    bad = tmp_path / "bad.npz"
    bad.write_bytes(b"nothing")
    with pytest.raises(HocketError, match=r"no \.npz file"):
        run(f"{program}:epoch", "--data", bad)


def test_data_without_an_argument_is_told_what_it_lacks(program, tmp_path):
    np.savez(tmp_path / "some.npz", keys=np.arange(3))
    with pytest.raises(HocketError, match="lacks what the function needs: out"):
        run(f"{program}:count", "--data", tmp_path / "some.npz")
    np.save(tmp_path / "one.npy", np.arange(3))
    with pytest.raises(HocketError, match=r"is no \.npz file of arrays"):
        run(f"{program}:count", "--data", tmp_path / "one.npy")


def test_a_serial_loop_is_told_what_may_help(tmp_path):
    path = tmp_path / "sampling.py"
    path.write_text(
        "def pairs(center, context, negative, w, c, rate):\n"
        "    for n in range(len(center)):\n"
        "        w[center[n]] += rate * c[context[n]]\n"
        "        c[negative[n]] += rate * w[center[n]]\n"
    )
    told = run(f"{path}:pairs")
    assert "serial" in told
    assert 'hint: if the algorithm tolerates late updates: permit={"c": "buffer"}' in told
    assert "--data arguments.npz" in told
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(9, size=50) for name in ("center", "context", "negative")}
    data = tmp_path / "arguments.npz"
    np.savez(data, w=np.ones((9, 2)), c=np.ones((9, 2)), rate=0.1, **columns)
    told = run(f"{path}:pairs", "--data", data)
    assert 'permit={"c": "buffer"}' in told
    assert "--data" not in told


def test_the_decorator_of_the_file_counts(tmp_path):
    path = tmp_path / "sums.py"
    path.write_text(
        "import hocket\n\n"
        '@hocket.parallel_for(permit={"w": "buffer"}, workers=UNKNOWN)\n'
        "def fit(x, u, w):\n"
        "    for n in range(len(u)):\n"
        "        w[u[n]] = w[u[n]] * 0.5 + w[0] * x[n]\n"
    )
    found = json.loads(run(f"{path}:fit", "--json"))
    assert found["loops"][0]["buffered"] == ["w"]
    ordered = json.loads(run(f"{path}:fit", "--ordered", "--json"))
    assert ordered["loops"][0]["schedule"] == "serial"
