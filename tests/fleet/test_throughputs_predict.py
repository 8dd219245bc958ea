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

from hocket.base.errors import InputFileError, UsageError
from hocket.cli.root import root
from hocket.cost.collectives import RingPath, ring_all_reduce_s
from hocket.fleet.throughputs import JobProfile, read_throughputs, stacked, write_throughputs
from hocket.fleet.throughputs.predict import Gradients, exposed_s, in_buckets, predict
from hocket.fleet.throughputs.servers import find_servers, widest_ring
from hocket.graph import Graph, Phase, Role
from hocket.graph.build import GraphBuilder
from hocket.graph.files import write_graph
from hocket.graph.generators import generate
from hocket.hardware.shorthand import cluster_from_text


def predict_throughputs(*args, **options):
    return predict(*args, **options).throughputs


DATA = Path(__file__).parents[3] / "shared" / "data" / "cluster"
MATMUL_EFFICIENCY = 0.82


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
    assert table.device_types == ("k80", "v100")
    assert table.profiles == (JobProfile("two products", 1),)
    assert table.alone[0] == pytest.approx(rate / 2e12)


def test_a_gang_adds_the_sum_of_what_the_last_op_makes() -> None:
    graph = training_step(flops=1e11)
    table = predict_throughputs(graph, [find_servers("k80")], (1, 4))
    half_s = 1e11 / (4.37e12 * MATMUL_EFFICIENCY)
    # PCIe inside a server: two links of 5 us from card to card at 12 GB/s.
    ring_s = 2 * 3 * (10e-6 + 4e8 / 4 / 12e9)
    assert table.alone[1, 0] == pytest.approx(4 / (2 * half_s + ring_s))
    assert table.device_types == ("k80", "k80_unconsolidated")
    assert table.alone[0, 0] == table.alone[0, 1], "one device cannot be spread"
    assert table.alone[1, 1] < table.alone[1, 0]


def test_what_the_backward_pass_makes_early_is_hidden_behind_the_rest() -> None:
    large, small = 10**8, 4 * 10**7
    early_last = [
        two_gradients((large, small)), two_gradients((small, large)),
    ]  # fmt: skip
    servers = find_servers("k80", network_bps=1e9)
    spread = [predict(graph, [servers], (2,)) for graph in early_last]
    one_s = spread[0].steps[0].step_s
    op_s = one_s / 3
    ring_s = [40e-6 + size_bytes / 1e9 for size_bytes in (large, small)]
    # The sum of the early one takes longer than the op that follows: the late one waits for it.
    assert op_s < ring_s[1]
    both_s = ring_s[0] + ring_s[1] - op_s
    for prediction in spread:
        assert prediction.gradient_bytes == large + small
        more_s = 2 / prediction.throughputs.alone[0, 1] - one_s
        assert more_s == pytest.approx(both_s, rel=1e-3)
    # With a network this fast, only what is made last is seen, and a tenth of all at the least.
    fast = find_servers("k80", network_bps=1e10)
    more_s = [
        2 / predict(graph, [fast], (2,)).throughputs.alone[0, 1] - one_s for graph in early_last
    ]
    assert more_s == pytest.approx([40e-6 + small / 1e10, 40e-6 + large / 1e10], rel=1e-3)


def two_gradients(sizes: tuple[int, int]) -> Graph:
    """A forward op and two backward ops of equal work, each with a gradient."""
    builder = GraphBuilder("two gradients")
    flops = 1e11
    weights = [builder.tensor(f"w{at}", size, role=Role.PARAMETER) for at, size in enumerate(sizes)]
    before = builder.tensor(
        "hidden", 1000, producer=builder.op("forward", "aten.mm", reads=weights, flops=flops)
    )
    for at, size in enumerate(sizes):
        reads = [weights[at], before]
        op = builder.op(f"back{at}", "aten.mm", reads=reads, flops=flops, phase=Phase.BACKWARD)
        before = builder.tensor(f"g{at}", size, producer=op, role=Role.GRADIENT)
    return builder.build()


GRADIENTS = st.lists(
    st.tuples(st.floats(0.0, 1.0), st.integers(1, 10**8)), min_size=1, max_size=30
).map(
    lambda parts: Gradients(
        ready_s=np.sort([-early_s for early_s, _ in parts]),
        size_bytes=np.array([float(size_bytes) for _, size_bytes in parts]),
    )
)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(gradients=GRADIENTS, gang=st.integers(2, 64), bandwidth_bps=st.floats(1e8, 1e12))
def test_sums_cost_no_less_than_the_last_bucket_and_no_more_than_all(
    gradients: Gradients, gang: int, bandwidth_bps: float
) -> None:
    buckets = in_buckets(gradients)
    assert buckets.total_bytes == gradients.total_bytes
    assert (buckets.size_bytes[:-1] >= 25 * 2**20).all()
    assert np.isin(buckets.ready_s, gradients.ready_s).all()
    path = RingPath(latency_s=1e-5, bandwidth_bps=bandwidth_bps)
    sums_s = ring_all_reduce_s(buckets.size_bytes, gang, path.latency_s, path.bandwidth_bps)
    more_s = exposed_s(buckets, gang, path)
    assert more_s <= sums_s.sum() * (1 + 1e-12)
    assert more_s >= 0.1 * sums_s.sum() * (1 - 1e-12)
    assert more_s >= (sums_s.sum() + buckets.ready_s[0]) * (1 - 1e-12)
    assert more_s >= (sums_s[-1] + buckets.ready_s[-1]) * (1 - 1e-12)
    slower = RingPath(latency_s=1e-5, bandwidth_bps=bandwidth_bps / 2)
    assert exposed_s(buckets, gang, slower) >= more_s


def test_a_gang_follows_from_what_one_device_was_measured_to_do() -> None:
    graph, servers = two_gradients((10**8, 4 * 10**7)), [find_servers("k80")]
    plain = predict(graph, servers, (1, 4))
    told = predict(graph, servers, (1, 4), measured={"k80": plain.throughputs.alone[0, 0] / 100})
    assert told.throughputs.alone[0, 0] == pytest.approx(plain.throughputs.alone[0, 0] / 100)
    # So slow a step hides all but what is never hidden: a tenth of the sums.
    one_s = 1 / told.throughputs.alone[0, 0]
    ring_s = 2 * 3 * (2 * 10e-6 + 1.4e8 / 4 / 12e9)
    assert 4 / told.throughputs.alone[1, 0] - one_s == pytest.approx(
        max(0.1 * ring_s, 2 * 3 * (10e-6 + 4e7 / 4 / 12e9)), rel=1e-3
    )
    with pytest.raises(UsageError, match="unknown device type 'k8'"):
        predict(graph, servers, measured={"k8": 1.0})
    with pytest.raises(UsageError, match="no number of steps"):
        predict(graph, servers, measured={"k80": 0.0})


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    flops=st.floats(1e9, 1e14),
    weight_bytes=st.integers(4, 4 * 10**9),
    device_type=st.sampled_from(["k80", "v100=dgx1-v100", "a100=dgx-a100-40g"]),
)
def test_gangs_never_beat_perfect_scaling_and_spreading_never_helps(
    flops: float, weight_bytes: int, device_type: str
) -> None:
    graph = training_step(flops=flops, weight_bytes=weight_bytes)
    table = predict_throughputs(graph, [find_servers(device_type)], (1, 2, 4, 8, 16))
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
    assert [step.obstacle for step in prediction.steps] == ["needs 13.0 GiB, k80 has 9.5 GiB", ""]
    measured = predict(graph, [find_servers("k80")], measured={"k80": 0.5})
    assert measured.throughputs.alone.tolist() == [[0.5]], "what ran does fit"
    assert measured.steps[0].peak_bytes == prediction.steps[0].peak_bytes


def test_gradients_are_those_of_a_training_step() -> None:
    k80 = [find_servers("k80")]
    assert predict(training_step(weight_bytes=123), k80).gradient_bytes == 123
    assert predict(generate("chain", 5), k80).gradient_bytes == 0
    transformer = generate("transformer", 200)
    expected = transformer.bytes_by_role()["gradient"]
    assert predict(transformer, k80).gradient_bytes == expected


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
        ("mixed-desktop", "3 device types"),
        ("4xv100-16g", "unknown hardware"),
    ],
)
def test_hardware_that_is_no_single_type_is_refused(text: str, message: str) -> None:
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


def test_a_ring_that_takes_too_long_to_find_is_that_of_the_numbers() -> None:
    """No cycle over two sides has an odd length, and only trying all of them would show it."""
    side = np.arange(18) % 2
    bandwidth = np.where(side[:, None] != side, 2.0, 1.0)
    assert widest_ring(bandwidth, 17) == tuple(range(17))


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
    assert again.device_types == table.device_types
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
    assert "needs" in result["models"][0]["device_types"]["k80"]["obstacle"]
    table = read_throughputs(output)
    assert table.device_types == ("k80", "v100", "k80_unconsolidated", "v100_unconsolidated")
    assert table.alone[table.find("big", 1)].tolist()[0] == 0.0
    slow = CliRunner().invoke(root, [*arguments, "--json", "--network", "1Gbit/s"])
    device_types = json.loads(slow.stdout)["models"][1]["device_types"]
    assert {device_type["between_servers_bps"] for device_type in device_types.values()} == {1.25e8}
    told = CliRunner().invoke(
        root, [*arguments[:2], *arguments[3:], "--json", "--measured", "k80=2.5"]
    )
    told_alone = json.loads(told.stdout)["throughputs"]["k80"]["('small', 1)"]["null"]
    assert told_alone == pytest.approx(2.5)
    shown = CliRunner().invoke(root, arguments)
    assert shown.exit_code == 0
    assert "k80: needs 13.0 GiB, k80 has 9.5 GiB" in shown.stdout


@pytest.mark.parametrize(
    "extra",
    [
        ["--on", "k80,k80"],
        ["--on", "k80", "--gang", "0"],
        ["--on", "k80", "--gang", "1,two"],
        ["--on", "k80", "--batch", "3"],
        ["--on", ""],
        ["--on", "k80", "--network", "10"],
        ["--on", "k80", "--network", "0Gbit/s"],
        ["--on", "k80", "--measured", "k80"],
        ["--on", "k80", "--measured", "p100=1"],
        ["--on", "k80", "--measured", "k80=nan"],
        ["--on", "k80", "--measured", "k80=1,k80=2"],
    ],
)
def test_the_command_refuses_what_means_nothing(tmp_path: Path, extra: list[str]) -> None:
    write_graph(training_step(), tmp_path / "graph.json")
    told = CliRunner().invoke(root, ["fleet", "throughputs", str(tmp_path / "graph.json"), *extra])
    assert isinstance(told.exception, UsageError) or told.exit_code == UsageError.exit_code
