"""Throughputs predicted for models: closed forms, gangs, memory, and the command."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.cli.root import root
from hocket.errors import InputFileError, UsageError
from hocket.fleet.throughputs import Profile, read_throughputs, stacked, write_throughputs
from hocket.fleet.throughputs.predict import gradient_bytes, predict, predict_throughputs
from hocket.fleet.throughputs.ring import widest_ring
from hocket.fleet.throughputs.servers import find_servers
from hocket.graph import Graph, Phase, Role
from hocket.graph.build import GraphBuilder
from hocket.graph.files import write_graph
from hocket.graph.generators import generate
from hocket.hardware.shorthand import cluster_from_text

DATA = Path(__file__).parents[3] / "shared" / "data" / "cluster"
MATMUL_EFFICIENCY = 0.7


def training_step(
    *, flops: float = 1e12, weight_bytes: int = 4 * 10**8, name: str = "two products"
) -> Graph:
    """A forward and a backward product of equal work."""
    builder = GraphBuilder(name)
    weight = builder.tensor("weight", weight_bytes, role=Role.PARAMETER)
    forward = builder.op("forward", "aten.mm", reads=[weight], flops=flops)
    hidden = builder.tensor("hidden", 1000, producer=forward)
    backward = builder.op(
        "backward", "aten.mm", reads=[weight, hidden], flops=flops, phase=Phase.BACKWARD
    )
    builder.tensor("gradient", weight_bytes, producer=backward, role=Role.GRADIENT)
    return builder.build()


def test_one_device_takes_the_work_over_the_attainable_rate() -> None:
    table = predict_throughputs(training_step(), [find_servers("k80"), find_servers("v100")])
    rate = np.array([4.37e12, 15.7e12]) * MATMUL_EFFICIENCY
    assert table.kinds == ("k80", "v100")
    assert table.profiles == (Profile("two products", 1),)
    assert table.alone[0] == pytest.approx(rate / 2e12)


def test_a_gang_adds_the_part_of_the_ring_that_the_backward_pass_does_not_hide() -> None:
    graph = training_step(flops=1e11)
    table = predict_throughputs(graph, [find_servers("k80")], (1, 4))
    half_s = 1e11 / (4.37e12 * MATMUL_EFFICIENCY)
    # PCIe inside a server: two links of 5 us from card to card at 12 GB/s.
    ring_s = 2 * 3 * (10e-6 + 4e8 / 4 / 12e9)
    assert ring_s > half_s, "this case is to have exposed communication"
    expected = 4 / (2 * half_s + max(0.1 * ring_s, ring_s - half_s))
    assert table.alone[1, 0] == pytest.approx(expected)
    assert table.kinds == ("k80", "k80_unconsolidated")
    assert table.alone[0, 0] == table.alone[0, 1], "one device cannot be spread"
    assert table.alone[1, 1] < table.alone[1, 0]


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    flops=st.floats(1e9, 1e14),
    weight_bytes=st.integers(4, 4 * 10**9),
    kind=st.sampled_from(["k80", "v100=dgx1-v100", "a100=dgx-a100-40g"]),
)
def test_gangs_never_beat_perfect_scaling_and_spreading_never_helps(
    flops: float, weight_bytes: int, kind: str
) -> None:
    graph = training_step(flops=flops, weight_bytes=weight_bytes)
    table = predict_throughputs(graph, [find_servers(kind)], (1, 2, 4, 8, 16))
    together, spread = table.alone.T
    gangs = np.array([1, 2, 4, 8, 16])
    assert (together <= gangs * together[0] * (1 + 1e-12)).all()
    assert (spread <= together * (1 + 1e-12)).all()
    assert (together > 0.0).all()


def test_too_little_memory_is_zero_and_said() -> None:
    graph = training_step(weight_bytes=7 * 10**9)
    prediction = predict(graph, [find_servers("k80"), find_servers("v100")], (1, 2))
    assert prediction.throughputs.alone[:, [0, 2]].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert (prediction.throughputs.alone[:, [1, 3]] > 0.0).all()
    assert [step.obstacle for step in prediction.steps] == ["needs 13.0 GiB, k80 has 11.2 GiB", ""]


def test_gradients_are_those_of_a_training_step() -> None:
    assert gradient_bytes(training_step(weight_bytes=123)) == 123
    inference = generate("chain", 5)
    assert gradient_bytes(inference) == 0
    transformer = generate("transformer", 200)
    assert gradient_bytes(transformer) == transformer.bytes_by_role()["gradient"]


def test_a_graph_without_work_is_refused() -> None:
    builder = GraphBuilder("idle")
    builder.op("nothing", "aten.view", reads=[])
    with pytest.raises(InputFileError, match="no work"):
        predict_throughputs(builder.build(), [find_servers("k80")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v101", "unknown hardware"),
        ("=v100", "cannot read"),
        ("v100=", "cannot read"),
        ("a_unconsolidated=v100", "cannot read"),
        ("mixed-desktop", "3 kinds"),
        ("4xv100-16g", "unknown hardware"),
    ],
)
def test_hardware_that_is_no_single_kind_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_servers(text)


def test_a_short_name_stands_for_the_smallest_memory() -> None:
    assert find_servers("v100").hardware == "v100-16g"
    assert find_servers("A100").kind.name == "a100-40g"
    assert find_servers("mine=dgx-h100").name == "mine"


# ── rings ────────────────────────────────────────────────────────────────────────────────────────


def narrowest(bandwidth_bps: np.ndarray, ring: tuple[int, ...]) -> float:
    both = np.minimum(bandwidth_bps, bandwidth_bps.T)
    return min(float(both[a, b]) for a, b in zip(ring, (*ring[1:], ring[0]), strict=True))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_the_ring_is_as_wide_as_the_best_of_all_rings(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 6))
    length = data.draw(st.integers(2, size))
    entries = st.lists(st.integers(1, 4), min_size=size * size, max_size=size * size)
    bandwidth = np.array(data.draw(entries), dtype=float).reshape(size, size)
    ring = widest_ring(bandwidth, length)
    assert len(set(ring)) == length
    best = max(narrowest(bandwidth, p) for p in itertools.permutations(range(size), length))
    assert narrowest(bandwidth, ring) == best


def test_the_ring_of_a_dgx1_uses_double_links() -> None:
    routes = cluster_from_text("dgx1-v100").routes
    assert narrowest(routes.bandwidth_bps, widest_ring(routes.bandwidth_bps, 8)) == 50e9


def test_a_gang_larger_than_a_server_goes_through_the_network() -> None:
    servers = find_servers("v100=dgx1-v100")
    assert servers.consolidated(8).bandwidth_bps == 50e9
    assert servers.consolidated(9) == servers.consolidated(64)
    assert servers.consolidated(9).bandwidth_bps == servers.between.bandwidth_bps


# ── files ────────────────────────────────────────────────────────────────────────────────────────

HOSTILE = """it's "quoted" \\ \x1b[31m é \u2028 __import__('os')"""


@settings(derandomize=True, deadline=None, max_examples=30)
@given(names=st.lists(st.text(max_size=80), min_size=1, max_size=3, unique=True))
def test_tables_come_back_as_they_were(
    names: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    servers = [find_servers("k80"), find_servers("t4")]
    table = stacked(
        [
            predict_throughputs(training_step(), servers, (1, 2), job_type=name or "-")
            for name in {name or "-" for name in (*names, HOSTILE)}
        ]
    )
    path = tmp_path_factory.mktemp("tables") / "table.json"
    write_throughputs(path, table)
    again = read_throughputs(path)
    assert again.kinds == table.kinds
    assert again.profiles == table.profiles
    assert (again.alone == table.alone).all()


def test_two_models_of_one_name_are_refused() -> None:
    table = predict_throughputs(training_step(), [find_servers("k80")])
    with pytest.raises(UsageError, match="two jobs"):
        stacked([table, table])
    with pytest.raises(UsageError, match="characters"):
        write_throughputs("/dev/null", predict_throughputs(
            training_step(name="x" * 1000), [find_servers("k80")]
        ))  # fmt: skip


@pytest.mark.skipif(not DATA.is_dir(), reason="the public tables are not here")
def test_the_public_table_is_written_as_it_was_read(tmp_path: Path) -> None:
    table = read_throughputs(DATA / "gavel" / "simulation_throughputs.json")
    write_throughputs(tmp_path / "table.json", table)
    again = read_throughputs(tmp_path / "table.json")
    assert (again.alone == table.alone).all()
    assert (again.beside == table.beside).all()


# ── command ──────────────────────────────────────────────────────────────────────────────────────


def test_the_command_predicts_and_writes(tmp_path: Path) -> None:
    write_graph(training_step(weight_bytes=7 * 10**9, name="big"), tmp_path / "big.json")
    write_graph(training_step(name="small"), tmp_path / "small.json")
    arguments = ["fleet", "throughputs", str(tmp_path / "big.json"), str(tmp_path / "small.json")]
    arguments += ["--on", "k80,v100=dgx1-v100", "--gang", "1,8"]
    output = tmp_path / "table.json"
    told = CliRunner().invoke(root, [*arguments, "--json", "-o", str(output)])
    assert told.exit_code == 0, told.output
    result = json.loads(told.stdout)
    assert result["throughputs"] == json.loads(output.read_text())
    assert "needs" in result["models"][0]["kinds"]["k80"]["obstacle"]
    table = read_throughputs(output)
    assert table.kinds == ("k80", "v100", "k80_unconsolidated", "v100_unconsolidated")
    assert table.alone[table.find("big", 1)].tolist()[0] == 0.0
    shown = CliRunner().invoke(root, arguments)
    assert shown.exit_code == 0
    assert "k80: needs 13.0 GiB, k80 has 11.2 GiB" in shown.stdout


@pytest.mark.parametrize(
    "extra",
    [
        ["--on", "k80,k80"],
        ["--on", "k80", "--gang", "0"],
        ["--on", "k80", "--gang", "1,two"],
        ["--on", "k80", "--batch", "3"],
        ["--on", ""],
    ],
)
def test_the_command_refuses_what_means_nothing(tmp_path: Path, extra: list[str]) -> None:
    write_graph(training_step(), tmp_path / "graph.json")
    told = CliRunner().invoke(root, ["fleet", "throughputs", str(tmp_path / "graph.json"), *extra])
    assert told.exit_code != 0
    assert isinstance(told.exception, UsageError)
