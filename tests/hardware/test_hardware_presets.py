"""Presets: the figures and the wiring of public documents."""

import csv
import json
import math
import runpy
import tomllib
from pathlib import Path

import numpy as np
import pytest

from hocket.graph import DTYPES
from hocket.hardware import Cluster, cluster_from_text
from hocket.hardware.files import machine_from_dict
from hocket.hardware.kinds import PEAK_TYPES, PRESETS, preset_kinds
from hocket.hardware.shorthand import joining_note, machine_names

DATA = Path(__file__).parents[3] / "shared" / "data"


def pair(cluster: Cluster, src: int, dst: int) -> tuple[float, float, int]:
    routes = cluster.routes
    return (
        float(routes.bandwidth_bps[src, dst]),
        float(routes.latency_s[src, dst]),
        int(routes.hops[src, dst]),
    )


def nvlinks(cluster: Cluster, per_link_bps: float) -> dict[tuple[int, int], float]:
    number = {name: index for index, name in enumerate(cluster.device_names)}
    return {
        (number[link.ends[0]], number[link.ends[1]]): link.bandwidth_bps / per_link_bps
        for link in cluster.links
        if all(end in number for end in link.ends)
    }


def test_peak_types_cover_the_types_of_graphs():
    assert set(PEAK_TYPES) == {*DTYPES, "tf32"}


def test_every_kind_has_plausible_figures_and_a_source():
    for name, entry in preset_kinds().items():
        kind = entry.kind
        assert kind.source, name
        assert entry.host_link is not None, name
        assert 1e10 < kind.peak_flops["float32"] < 2e14, name
        assert 1e10 <= kind.memory_bandwidth_bps < 1e13, name
        assert 1e-6 <= kind.launch_s <= 1e-5, name
        intensity = kind.peak_flops["float32"] / kind.memory_bandwidth_bps
        assert 2 < intensity < 150, name


@pytest.mark.parametrize(
    ("name", "memory_gb", "half_tflops"),
    [
        ("rtx4080", 16, 97.5), ("rtx4090", 24, 165.2), ("rtx5090", 32, 209.5), ("l40s", 48, 362),
        ("a6000", 48, 154.8), ("b200", 180, 2250), ("gb200", 186, 2500), ("mi300x", 192, 1307.4),
        ("apple-m", 96, 13.6), ("rtx3060", 12, 25.4), ("rtx3070", 8, 40.6), ("rtx3080", 10, 59.6),
        ("rtx4060", 8, 30.2), ("rtx4070", 12, 58.2), ("rtx5070", 12, 61.8), ("rtx5080", 16, 112.6),
        ("a40", 48, 149.7), ("a100-pcie", 80, 312), ("h100-nvl", 94, 835.5),
        ("mi325x", 256, 1307.4),
    ],
)  # fmt: skip
def test_devices_that_people_own_have_the_figures_of_their_data_sheets(
    name, memory_gb, half_tflops
):
    (device,) = cluster_from_text(name).devices
    assert device.kind.name == name
    assert device.kind.peak_flops["bfloat16"] == pytest.approx(half_tflops * 1e12)
    # Drivers and shared memory leave less than the box says.
    assert 0.75 * memory_gb * 1e9 < device.memory_bytes < 1.08 * memory_gb * 1e9


def test_shorthand_of_a_kind_says_that_it_means_pcie_and_names_the_machine():
    note = joining_note("8xh100")
    assert "joined by PCIe" in note
    assert "dgx-h100" in note
    assert "gb200-nvl72" in joining_note("72xgb200")
    assert cluster_from_text("8xh100").network.inside_bps < 50e9
    for silent in ("1xh100", "dgx-h100", "8xdgx-h100", "4xl4", "4xrtx4090", "9xnothing", "x.toml"):
        assert joining_note(silent) is None


def test_every_preset_has_routes_between_all_devices():
    for name in machine_names():
        cluster = cluster_from_text(name)
        assert cluster.routes.hops.shape == (cluster.num_devices,) * 2
        assert cluster.name == name


def test_every_preset_file_gives_its_source_in_words():
    for path in PRESETS.glob("*.toml"):
        assert "source" in path.read_text(encoding="utf-8"), path.name


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("v100-32g", "V100-SXM2-32GB"),
        ("a100-40g", "A100-SXM4-40GB"),
        ("a100-80g", "A100-SXM4-80GB (Selene)"),
        ("h100-80g", "H100-SXM5-80GB"),
        ("h200-141g", "H200-SXM-141GB"),
    ],
)
def test_kinds_agree_with_the_collected_data_sheets(kind, row):
    path = DATA / "parallelism" / "hardware_specs.csv"
    if not path.exists():
        pytest.skip("shared data is not here")
    lines = [x for x in path.read_text(encoding="utf-8").splitlines() if x[:8] != "# source"]
    spec = next(line for line in csv.DictReader(lines) if line["gpu"] == row)
    ours = preset_kinds()[kind].kind
    half = ours.peak_flops.get("bfloat16", ours.peak_flops["float16"])
    assert half == float(spec["bf16_tflops"]) * 1e12
    assert ours.memory_bandwidth_bps == float(spec["hbm_gb_s"]) * 1e9
    assert ours.memory_bytes == pytest.approx(float(spec["mem_gb"]) * 1e9, rel=0.08)
    if spec["fp8_tflops"]:
        assert ours.peak_flops["float8"] == float(spec["fp8_tflops"]) * 1e12


@pytest.mark.parametrize(
    ("preset", "topology", "per_link_bps"),
    [("dgx1-p100", "dgx1p", 20e9), ("dgx1-v100", "dgx1v", 25e9)],
)
def test_dgx1_has_the_published_wiring(preset, topology, per_link_bps):
    path = DATA / "communication" / "topologies.json"
    if not path.exists():
        pytest.skip("shared data is not here")
    spec = json.loads(path.read_text(encoding="utf-8"))[topology]
    wanted = {(a, b): links for a, b, links in spec["edges"]}
    assert nvlinks(cluster_from_text(preset), per_link_bps) == wanted
    assert per_link_bps == spec["bw_per_link"]["nominal"] * 1e9


@pytest.mark.parametrize(
    ("preset", "per_link_bps", "per_gpu"), [("dgx1-p100", 20e9, 4), ("dgx1-v100", 25e9, 6)]
)
def test_dgx1_uses_every_nvlink_of_every_gpu(preset, per_link_bps, per_gpu):
    edges = nvlinks(cluster_from_text(preset), per_link_bps)
    for gpu in range(8):
        assert sum(count for ends, count in edges.items() if gpu in ends) == per_gpu


def test_dgx1_pairs_without_nvlink_cross_pcie_and_qpi():
    cluster = cluster_from_text("dgx1-v100")
    assert pair(cluster, 0, 3)[0] == 50e9
    assert pair(cluster, 0, 1)[0] == 25e9
    assert pair(cluster, 0, 5)[0] == 6e9
    assert pair(cluster, 0, 5)[2] == 5
    channels = [cluster.routes.channel_names[c] for c in cluster.routes.path(0, 5)]
    assert "socket0-socket1 socket0→socket1" in channels


@pytest.mark.parametrize(
    ("preset", "num_gpus", "bandwidth_bps"),
    [
        ("dgx2", 16, 150e9),
        ("dgx-a100-40g", 8, 300e9),
        ("dgx-a100-80g", 8, 300e9),
        ("dgx-h100", 8, 450e9),
        ("hgx-h200", 8, 450e9),
    ],
)
def test_switched_machines_give_every_pair_the_full_rate(preset, num_gpus, bandwidth_bps):
    routes = cluster_from_text(preset).routes
    off_diagonal = routes.bandwidth_bps[~np.eye(num_gpus, dtype=bool)]
    assert (off_diagonal == bandwidth_bps).all()


def test_rtx2080x4_transfers_cost_what_baechi_fitted():
    cluster = cluster_from_text("rtx2080x4")
    bandwidth_bps, latency_s, hops = pair(cluster, 0, 3)
    assert hops == 1
    assert latency_s == pytest.approx(134e-6)
    for size_bytes in (1, 10**6, 2**29):
        fitted_s = (0.0001754 * size_bytes + 134) * 1e-6
        assert latency_s + size_bytes / bandwidth_bps == pytest.approx(fitted_s, rel=1e-6)
    assert (
        len({int(cluster.routes.path(a, b)[0]) for a in range(4) for b in range(4) if a != b}) == 1
    )


def test_mixed_desktop_has_unequal_devices_and_links():
    cluster = cluster_from_text("mixed-desktop")
    assert len({device.memory_bytes for device in cluster.devices}) == 3
    assert len({device.kind.peak_flops["float32"] for device in cluster.devices}) == 3
    assert {pair(cluster, a, b)[0] for a, b in ((0, 1), (0, 2), (1, 2))} == {6e9, 3e9}


def test_prices_add_up_over_devices():
    assert math.isclose(cluster_from_text("8xv100-16g").price_per_hour, 24.48)


def test_pages_name_every_preset_and_show_a_valid_file():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "reference" / "hardware.md").read_text(encoding="utf-8")
    made = runpy.run_path(str(root / "scripts" / "presets"))
    for name in machine_names():
        assert f"`{name}`" in made["page"](), name
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), "run scripts/presets"
    example = page.split("```toml\n")[1].split("```")[0]
    cluster = machine_from_dict(tomllib.loads(example), "docs").cluster
    assert cluster.device_names == ("gpu0", "gpu1", "old")
    assert len(cluster.links) == 3
