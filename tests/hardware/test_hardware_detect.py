"""Detection: what nvidia-smi prints becomes a cluster; the CPU is measured."""

import time

import pytest

from hocket.hardware import cluster_from_dict, cluster_from_text, cluster_to_toml
from hocket.hardware import detect as detect_module
from hocket.hardware.detect import (
    detect,
    detect_cpu,
    gpu_machine,
    last_level_cache_bytes,
    parse_gpus,
    usable_memory_bytes,
)
from hocket.hardware.topology import parse_topology

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def matrix(rows: list[str], nics: int = 0, affinity: tuple[str, ...] = ()) -> str:
    """Text in the form of ``nvidia-smi topo -m`` from relations separated by spaces."""
    num = len(rows)
    head = [f"GPU{g}" for g in range(num)] + [f"NIC{n}" for n in range(nics)]
    lines = ["\t\x1b[4m" + "\t".join([*head, "CPU Affinity", "NUMA Affinity"]) + "\x1b[0m"]
    for gpu, row in enumerate(rows):
        cells = [" X " if cell == "X" else cell for cell in row.split()] + ["NODE"] * nics
        near = affinity[gpu] if affinity else "N/A"
        lines.append("\t".join([f"GPU{gpu}", *cells, near, "0", "", "N/A"]))
    lines += [f"NIC{n}\t" + "\t".join(["NODE"] * (num + nics)) for n in range(nics)]
    return "\n".join(lines) + "\n" + LEGEND


DGX1V_LINKS = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip


def dgx1_matrix() -> str:
    def relation(a: int, b: int) -> str:
        if a == b:
            return "X"
        count = DGX1V_LINKS.get((min(a, b), max(a, b)))
        return f"NV{count}" if count else "SYS"

    rows = [" ".join(relation(a, b) for b in range(8)) for a in range(8)]
    return matrix(rows, nics=4, affinity=("0-19,40-59",) * 4 + ("20-39,60-79",) * 4)


def machine(model: str, count: int, topology: str, memory_mib: int = 16384, pcie: str = "3, 16"):
    gpus = parse_gpus(f"{model}, {memory_mib} MiB, {pcie}\n" * count)
    assert len(gpus) == count
    return cluster_from_dict(gpu_machine(gpus, topology), "test")


def test_detect_finds_the_wiring_of_a_dgx1():
    found = machine("Tesla V100-SXM2-16GB", 8, dgx1_matrix())
    preset = cluster_from_text("dgx1-v100")
    assert [d.kind for d in found.devices] == [d.kind for d in preset.devices]
    ours, theirs = found.routes.bandwidth_bps, preset.routes.bandwidth_bps
    direct = preset.routes.hops == 1
    assert (ours[direct] == theirs[direct]).all()
    assert ((found.routes.hops == 1) == direct).all()
    assert found.switches == ("numa0", "numa1")
    assert ours[0, 5] == 10e9


def test_detect_sees_a_switch_where_nvlinks_would_not_suffice():
    rows = [" ".join("X" if a == b else "NV12" for b in range(8)) for a in range(8)]
    found = machine("NVIDIA A100-SXM4-80GB", 8, matrix(rows), 81920, "4, 16")
    assert "nvswitch" in found.switches
    assert found.routes.bandwidth_bps[0, 7] == 300e9
    assert found.routes.hops[0, 7] == 2
    rows = [" ".join("X" if a == b else "NV4" for b in range(4)) for a in range(4)]
    meshed = machine("NVIDIA A100-SXM4-80GB", 4, matrix(rows), 81920, "4, 16")
    assert meshed.switches == ()
    assert meshed.routes.bandwidth_bps[0, 3] == 100e9
    assert meshed.routes.hops[0, 3] == 1


def test_detect_builds_the_pcie_tree():
    rows = ["X PIX SYS SYS", "PIX X SYS SYS", "SYS SYS X PHB", "SYS SYS PHB X"]
    found = machine("Tesla T4", 4, matrix(rows), 15360)
    assert found.switches == ("numa0", "numa1", "pcie0")
    crossed = [found.routes.channel_names[c].split(" ")[0] for c in found.routes.path(0, 2)]
    assert crossed == ["gpu0-pcie0", "pcie0-numa0", "numa0-host", "numa1-host", "gpu2-numa1"]
    assert found.routes.hops[0, 1] == 2
    assert found.routes.hops[2, 3] == 2


def test_detect_joins_gpus_through_the_host_where_there_is_no_matrix():
    found = machine("NVIDIA L4", 2, "", 23034, "4, 8")
    assert [link.ends for link in found.links] == [("gpu0", "host"), ("gpu1", "host")]
    assert found.links[0].bandwidth_bps == 12e9


def test_detect_describes_a_single_gpu():
    found = machine("NVIDIA H200", 1, matrix(["X"], affinity=("0-15",)), 143771, "5, 16")
    assert found.device_names == ("gpu0",)
    assert found.devices[0].kind.name == "h200-141g"
    assert found.devices[0].memory_bytes == 143771 * 2**20
    assert [(x.ends, x.bandwidth_bps) for x in found.links] == [(("gpu0", "host"), 48e9)]


def test_detect_keeps_the_smaller_of_reported_and_known_memory():
    assert machine("Tesla T4", 1, "", 14910).devices[0].memory_bytes == 14910 * 2**20
    assert machine("Tesla T4", 1, "", 16384).devices[0].memory_bytes == 15360 * 2**20


def test_detect_marks_unknown_models_as_placeholders():
    found = machine("NVIDIA Quantum 9000 (rev. ä)", 2, "", 4096)
    assert found.kinds[0].memory_bytes == 2**32
    assert "placeholder" in found.kinds[0].source
    assert "kinds.nvidia-quantum-9000-rev" in cluster_to_toml(found)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40g"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA GeForce RTX 3060", "rtx3060"),
        ("NVIDIA GeForce RTX 3070 Ti", None),
        ("NVIDIA GeForce RTX 4070 SUPER", None),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5080", "rtx5080"),
        ("Tesla P100-SXM2-16GB", "p100-16g"),
        ("Tesla K80", "k80"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 2080", "rtx2080"),
        ("NVIDIA GeForce RTX 4080", "rtx4080"),
        ("NVIDIA GeForce RTX 4080 SUPER", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GeForce RTX 2080 Ti", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA L40", None),
        ("NVIDIA A10", None),
    ],
)
def test_models_take_the_preset_of_their_own_only(model, kind):
    assert parse_gpus(f"{model}, 1024 MiB, 3, 16")[0].preset == kind


@pytest.mark.parametrize(
    "text", ["", "No devices were found\n", "a,b\n", "x, [N/A], 3, 16\n", "x, 0 MiB, 3, 16\n"]
)
def test_parse_gpus_finds_none_in_other_text(text):
    assert parse_gpus(text) == []


def test_parse_gpus_takes_generation_3_x16_where_pcie_is_unknown():
    assert parse_gpus("x, 1024 MiB, [N/A], [N/A]")[0].pcie_bps == 12e9


@pytest.mark.parametrize("text", ["", "garbage", "\tGPU0\nGPU0\n", "\tGPU0\tGPU1\nGPU0\t X \n"])
def test_parse_topology_gives_none_for_text_that_does_not_fit(text):
    assert parse_topology(text, 2) is None


def test_detect_measures_the_processor_in_about_a_second(monkeypatch):
    monkeypatch.setattr(detect_module, "_nvidia_smi", lambda *arguments: "")
    start = time.process_time()
    cluster = detect()
    assert time.process_time() - start < 20
    (device,) = cluster.devices
    assert device.kind.is_cpu
    assert device.kind.name == "cpu"
    assert 1e8 < device.kind.peak_flops["float32"] < 1e14
    assert 1e8 < device.kind.memory_bandwidth_bps < 1e13
    assert 1e7 < cluster.host_update_bps < 1e13
    assert "measured" in device.kind.source
    assert cluster.meta["from"] == "detect"


def test_detected_processors_can_be_joined(monkeypatch, tmp_path):
    monkeypatch.setattr(detect_module, "_nvidia_smi", lambda *arguments: "")
    monkeypatch.chdir(tmp_path)
    for name, rates in (("here", (5e10, 2e10)), ("there", (7e10, 3e10))):
        monkeypatch.setattr(detect_module, "_measured", lambda rates=rates: rates)
        (tmp_path / f"{name}.toml").write_text(cluster_to_toml(detect()), encoding="utf-8")
    twice = cluster_from_text("2xhere.toml")
    assert twice.device_names == ("host0.cpu0", "host1.cpu0")
    assert [kind.name for kind in twice.kinds] == ["cpu"]
    assert twice.routes.bandwidth_bps[0, 1] == 1e10  # half of its memory's, less than the network
    both = cluster_from_text("here.toml+there.toml")
    assert [device.kind.peak_flops["float32"] for device in both.devices] == [5e10, 7e10]
    assert [kind.name for kind in both.kinds] == ["cpu", "cpu@host1"]


def test_detect_uses_what_nvidia_smi_answers(monkeypatch):
    def answer(*arguments: str) -> str:
        return matrix(["X NV2", "NV2 X"]) if arguments[0] == "topo" else QUERY

    monkeypatch.setattr(detect_module, "_nvidia_smi", answer)
    cluster = detect()
    assert [device.kind.name for device in cluster.devices] == ["v100-32g", "v100-32g"]
    assert cluster.routes.bandwidth_bps[0, 1] == 50e9


QUERY = "Tesla V100-SXM2-32GB, 32768 MiB, 3, 16\nTesla V100-SXM2-32GB, 32768 MiB, 3, 16\n"


def test_detect_survives_an_nvidia_smi_that_fails(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho broken driver\nexit 9\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert detect().devices[0].kind.is_cpu


@pytest.mark.parametrize(
    ("files", "wanted_bytes"),
    [
        ({}, 8 * 2**30),
        ({"sys/fs/cgroup/memory.max": "max\n"}, 8 * 2**30),
        ({"sys/fs/cgroup/memory.max": f"{2**30}\n"}, 2**30),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**31}\n"}, 2**31),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 8 * 2**30),
        (
            {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": f"{2**29}\n"},
            2**29,
        ),
    ],
)
def test_usable_memory_is_what_the_control_group_allows(tmp_path, files, wanted_bytes):
    for name, text in {"proc/meminfo": "MemTotal:        8388608 kB\n", **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert usable_memory_bytes(tmp_path) == wanted_bytes


def test_processes_share_the_processor_and_talk_at_the_rate_that_was_measured(monkeypatch):
    from hocket.hardware import detect as module
    from hocket.hardware.detect import Loopback

    monkeypatch.setattr(module, "measure_loopback", lambda: Loopback(2e9, 8e-5))
    monkeypatch.setattr(module, "_measured", lambda: (1e11, 2e10))
    monkeypatch.setattr(module, "usable_memory_bytes", lambda: 8 * 2**30)
    cluster = module.detect(processes=2)
    assert cluster.device_names == ("cpu0", "cpu1")
    assert {device.memory_bytes for device in cluster.devices} == {4 * 2**30}
    assert cluster.kinds[0].peak_flops["float32"] == 5e10
    assert cluster.routes.latency_s[0, 1] == pytest.approx(8e-5)  # the cost of one message
    assert cluster.routes.bandwidth_bps[0, 1] == 2e9


def test_a_connection_between_processes_is_measured_and_leaves_nothing_behind():
    import psutil

    from hocket.hardware.detect import GLOO_MESSAGE_S, measure_loopback

    before = psutil.Process().children()
    found = measure_loopback()
    assert found is not None
    assert 1e6 < found.bandwidth_bps < 1e12
    assert GLOO_MESSAGE_S < found.message_s < 1
    assert psutil.Process().children() == before


def test_processes_that_cannot_be_joined_are_no_error(monkeypatch):
    from hocket.hardware import detect as loopback

    def refused(*_, **__):
        raise PermissionError(13, "no sockets here")

    monkeypatch.setattr(loopback.socket, "create_server", refused)
    assert loopback.measure_loopback() is None


def test_the_processor_is_found_beside_gpus(monkeypatch):
    gpus = parse_gpus("NVIDIA H200, 143771 MiB, 5, 16\n")
    monkeypatch.setattr("hocket.hardware.detect.find_gpus", lambda: gpus)
    assert not detect().kinds[0].is_cpu
    assert [kind.is_cpu for kind in detect_cpu().kinds] == [True]


def test_caches_that_cores_share_are_counted_once(tmp_path):
    assert last_level_cache_bytes(tmp_path) is None
    for core in range(4):
        for level, size, shared in (
            (2, "512K", str(core)),
            (3, "32768K", ("0-1", "2-3")[core // 2]),
        ):
            index = tmp_path / f"sys/devices/system/cpu/cpu{core}/cache/index{level}"
            index.mkdir(parents=True)
            for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
                (index / name).write_text(f"{text}\n")
    assert last_level_cache_bytes(tmp_path) == 2 * 32 * 2**20
