"""Detect the Cluster of this machine: its NVIDIA GPUs and their links, or else its CPU.

``nvidia-smi`` lists the GPUs; known models get the figures of the presets. Without GPUs the CPU is
timed with numpy for less than a second. If the CPU is split into several devices, a connection
between two processes is timed too. On machines with GPUs the CPU is no device, but the rate of
optimizer updates on the CPU is measured.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.hardware.cluster import Cluster
from hocket.hardware.files import cluster_from_dict
from hocket.hardware.kinds import preset_kinds, preset_tables
from hocket.hardware.topology import DevicePort, gpu_links, parse_topology
from hocket.processes.start import start_module

# Bandwidth and message overhead between two processes: a child process echoes what it receives over
# a loopback connection, as gloo's ranks communicate. The shortest round trip of one byte gives the
# overhead of a message, the shortest of a large message the bandwidth. Minima are used because
# other programs only lengthen round trips.

GLOO_MESSAGE_S = 50e-6
"""Overhead of gloo per message, in which gloo's own thread adds latency: 66 us in total, in
contrast to 16 us of a plain connection. Both were measured with PyTorch 2.13 on two cores.
"""
LARGE_BYTES = 8 * 10**6
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Loopback:
    """Bandwidth and message overhead of one direction between two processes."""

    bandwidth_bps: float
    message_s: float


def measure_loopback() -> Loopback | None:
    """Measure a connection between two processes; None if they cannot connect."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(TIMEOUT_S)
            port = server.getsockname()[1]
            arguments = (str(port), str(LARGE_BYTES))
            with start_module(
                "hocket.processes.echo", arguments, output=subprocess.DEVNULL
            ) as child:
                try:
                    return _measure_echo(server)
                finally:
                    child.kill()
    except OSError:
        return None


def _measure_echo(server: socket.socket) -> Loopback:
    link, _ = server.accept()
    with link:
        link.settimeout(TIMEOUT_S)
        # Nagle's algorithm would delay the one-byte messages.
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = memoryview(bytearray(LARGE_BYTES))
        message_s = _one_direction_s(link, data[:1], 100)
        large_s = _one_direction_s(link, data, 8)
    bandwidth_bps = LARGE_BYTES / max(large_s - message_s, 1e-9)
    # More than two digits are noise, and equal figures in two runs give equal plans.
    return Loopback(float(f"{bandwidth_bps:.2g}"), float(f"{message_s + GLOO_MESSAGE_S:.2g}"))


def _one_direction_s(link: socket.socket, data: memoryview, count: int) -> float:
    best_s = float("inf")
    for _ in range(count):
        start = time.perf_counter()
        link.sendall(len(data).to_bytes(8, "big"))
        link.sendall(data)
        got = 0
        while got < len(data):
            taken = link.recv_into(data[got:])
            if not taken:
                raise ConnectionError("the child process has ended")
            got += taken
        best_s = min(best_s, time.perf_counter() - start)
    return best_s / 2


NAME = "this-machine"

_QUERY = ("name", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
_UNKNOWN_NVLINKS = (18, 25e9)
"""Number of NVLinks, and bytes per second of one per direction, for a GPU whose preset states none.
"""
_LANE_BPS: Mapping[int, float] = {1: 1.875e8, 2: 3.75e8, 3: 7.5e8, 4: 1.5e9, 5: 3e9, 6: 6e9}
"""Bytes per second of one PCIe lane in one direction, by PCIe generation, in NCCL's model."""
PROCESS_BYTES = 300_000_000
"""Host memory of a process that has imported PyTorch and holds no tensors."""


@dataclass(frozen=True)
class Gpu:
    """One GPU in the output of nvidia-smi."""

    model: str
    memory_bytes: int
    pcie_bps: float

    @property
    def preset(self) -> str | None:
        """Name of the preset for this model; None if there is none."""
        patterns = {
            name: table["detect"]["model"]
            for name, table in preset_tables().items()
            if "detect" in table
        }
        return next((name for name in patterns if re.search(patterns[name], self.model)), None)

    @property
    def kind(self) -> str:
        """Name of the preset, or else the GPU's model name in lower case with hyphens."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.model.lower()).strip("-")
        return self.preset or slug or "gpu"


def detect(processes: int = 1) -> Cluster:
    """The cluster of this machine.

    With several ``processes`` the CPU becomes as many devices, which share its cores and memory and
    communicate over loopback.
    """
    # Several processes apply to the CPU only, because each GPU has one process in any case.
    gpus = find_gpus() if processes == 1 else []
    if not gpus:
        return detect_cpu(processes)
    machine = gpu_machine(gpus, _nvidia_smi("topo", "-m"))
    update_bps = _UPDATE_SHARE * measure_update_bps()
    return cluster_from_dict({**machine, "host_update": update_bps}, NAME)


def detect_cpu(processes: int = 1) -> Cluster:
    """The CPU of this machine as one or several devices, even if there are GPUs."""
    return cluster_from_dict(_cpu_machine(processes), NAME)


# ── GPUs ─────────────────────────────────────────────────────────────────────────────────────────


def find_gpus() -> list[Gpu]:
    """The GPUs of this machine in the order of nvidia-smi; empty if nvidia-smi cannot be run."""
    return parse_gpus(_nvidia_smi(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"))


def _nvidia_smi(*arguments: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        answer = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def parse_gpus(text: str) -> list[Gpu]:
    """GPUs in the output of nvidia-smi, one per line."""
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        memory = re.fullmatch(r"(\d{1,9}) MiB", cells[1]) if len(cells) == len(_QUERY) else None
        if memory is None or int(memory[1]) == 0:
            continue
        # Virtual machines report "[N/A]"; generation 3 with 16 lanes is assumed.
        generation, lanes = (int(cell) if cell.isdecimal() else 0 for cell in cells[2:])
        pcie_bps = _LANE_BPS.get(generation, _LANE_BPS[3]) * (lanes or 16)
        gpus.append(Gpu(cells[0], int(memory[1]) * 2**20, pcie_bps))
    return gpus


def gpu_machine(gpus: list[Gpu], topology_text: str) -> dict[str, Any]:
    """The content of a hardware file for a machine with these GPUs."""
    kinds: dict[str, Any] = {}
    devices = []
    ports = []
    for gpu in gpus:
        kind = gpu.kind
        memory_bytes, nvlinks = gpu.memory_bytes, _UNKNOWN_NVLINKS
        if gpu.preset is not None:
            # A card may have less memory than its preset; a plan must not count on more than
            # either.
            memory_bytes = min(memory_bytes, preset_kinds()[kind].kind.memory_bytes)
            nvlinks = preset_tables()[kind]["detect"].get("nvlinks", nvlinks)
        elif kind not in kinds:
            kinds[kind] = _unknown_kind(gpu)
        devices.append({"kind": kind, "memory": f"{memory_bytes}B"})
        ports.append(DevicePort(gpu.pcie_bps, nvlinks[1], int(nvlinks[0])))
    topology = parse_topology(topology_text, len(gpus))
    wiring: dict[str, Any] = {
        "links": [
            {"ends": [f"gpu{i}", "host"], "bandwidth": port.pcie_bps, "latency": 5e-6}
            for i, port in enumerate(ports)
        ]
    }
    if topology is not None:
        wiring = gpu_links(topology, ports)
    source = "nvidia-smi" if topology is None else "nvidia-smi, links from its topology matrix"
    meta = {"from": "detect", "source": source}
    return {"name": NAME, "meta": meta, "kinds": kinds, "devices": devices, **wiring}


def unstated_headroom_bytes(memory_bytes: int) -> int:
    """Headroom of a GPU without preset, by the rule of ``presets/kinds.toml``.

    It covers the context and libraries, 1 % of the memory for the driver, and 10 % of the tensors
    for fragmentation.
    """
    gib = 2**30
    rest = 0.99 * memory_bytes - 0.8 * gib
    return round(memory_bytes - rest + min(max(rest, 0) / 11, 4 * gib))


def _unknown_kind(gpu: Gpu) -> dict[str, Any]:
    return {
        "memory": f"{gpu.memory_bytes}B",
        "headroom": f"{min(unstated_headroom_bytes(gpu.memory_bytes), gpu.memory_bytes // 2)}B",
        "memory_bandwidth": "400GB/s",
        "peak": {"float32": "10TFLOP/s"},
        "launch": "5us",
        "source": f"{gpu.model}: the driver's memory; all rates are placeholders to correct",
    }


# ── CPU ────────────────────────────────────────────────────────────────────────────────────


def _cpu_machine(processes: int) -> dict[str, Any]:
    flops, bandwidth_bps = (rate / processes for rate in _measured())
    model = _cpu_model()
    memory_bytes = usable_memory_bytes() // processes
    between = measure_loopback() if processes > 1 else None
    shared = f", shared by {processes} processes" if processes > 1 else ""
    source = (
        f"{model}, {usable_cores()} cores{shared}: float32 and bandwidth measured with numpy, "
        "float64 assumed to be half"
    )
    kind = {
        "memory": f"{memory_bytes}B",
        "headroom": f"{min(PROCESS_BYTES, memory_bytes // 2)}B",
        "memory_bandwidth": bandwidth_bps,
        "peak": {"float32": flops, "float64": flops / 2},
        "launch": "2us",
        "cpu": True,
        # A message crosses the links of both ends, so each gets half of the latency. Without a
        # measurement the bandwidth is that of the presets: data is written to memory and read
        # again.
        "host_link": {"bandwidth": bandwidth_bps / 2, "latency": 0.0}
        if between is None
        else {"bandwidth": between.bandwidth_bps, "latency": between.message_s / 2},
        "source": source,
    }
    meta = {"from": "detect", "source": "no NVIDIA GPU found"}
    devices = [{"kind": "cpu", "name": "cpu", "count": processes}]
    return {
        "name": NAME, "meta": meta, "kinds": {"cpu": kind}, "devices": devices,
        "host_update": measure_update_bps() / processes,
    }  # fmt: skip


def _measured() -> tuple[float, float]:
    """FLOP/s and bytes per second of the CPU, rounded to two digits because the rest is noise.

    Measured once per process and number of cores: a measurement takes half a second, and two plans
    for the same cores should use the same rates.
    """
    return _rates_of(usable_cores())


@functools.cache
def _rates_of(num_cores: int) -> tuple[float, float]:
    import numpy as np

    size = 1024
    left = np.full((size, size), 1.5, dtype=np.float32)
    product = np.empty_like(left)
    source = np.ones(2**24, dtype=np.float32)
    target = np.empty_like(source)
    gemm_s = _best_s(lambda: np.matmul(left, left, out=product), budget_s=0.3)
    copy_s = _best_s(lambda: np.copyto(target, source), budget_s=0.2)
    flops, bandwidth_bps = 2 * size**3 / gemm_s, 2 * source.nbytes / copy_s
    return float(f"{flops:.2g}"), float(f"{bandwidth_bps:.2g}")


_UPDATE_SHARE = 0.42
"""Fraction of the measured update rate that remains while copies use the same memory and other
threads launch kernels. Measured: 58 and 69 of 137 GB/s with 16 cores of an H200's host, for models
of 1.5 and 4.2 B parameters. The lower value is used, because a rate that is a third too high costs
15 % of a step, and one that is a third too low 7 % (4.2 B parameters under 8 GiB).
"""


def measure_update_bps() -> float:
    """Bytes per second that all cores together read and write in in-place additions, to two digits.

    Like an optimizer update, an in-place addition reads several values per written value and
    overwrites what it has read. The arrays of each core are larger than its caches.
    """
    return _update_bps_of(usable_cores())


@functools.cache
def _update_bps_of(num_threads: int) -> float:
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    left = [np.zeros(2**22, dtype=np.float32) for _ in range(num_threads)]
    right = [np.ones(2**22, dtype=np.float32) for _ in range(num_threads)]

    def add(index: int) -> None:
        np.add(left[index], right[index], out=left[index])

    with ThreadPoolExecutor(num_threads) as pool:
        sum_s = _best_s(lambda: list(pool.map(add, range(num_threads))), budget_s=0.2)
    return float(f"{3 * num_threads * left[0].nbytes / sum_s:.2g}")


def _best_s(work: Callable[[], Any], budget_s: float) -> float:
    """Shortest time of several runs within the time budget, after one run to warm up."""
    work()
    best_s, stop = float("inf"), time.perf_counter() + budget_s
    while best_s == float("inf") or time.perf_counter() < stop:
        start = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - start)
    return max(best_s, 1e-9)


def _cpu_model() -> str:
    match = re.search(r"^model name\s*:\s*(.{1,200})$", _text("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_memory_bytes(root: Path = Path("/")) -> int:
    """Memory of the machine, or the limit of this process's control group if that is smaller.

    ``root`` replaces the root of the file system in tests.
    """
    match = re.search(r"^MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    total = int(match[1]) * 1024 if match else _memory_by_sysconf()
    return max(min([total, *_group_limits(root)]), 2**20)


def available_bytes(root: Path = Path("/")) -> int:
    """Available memory, including file caches; all usable memory if the system does not report it.

    ``root`` replaces the root of the file system in tests.
    """
    usable = usable_memory_bytes(root)
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return min(usable, int(match[1]) * 1024) if match else usable


def last_level_cache_bytes(root: Path = Path("/")) -> int | None:
    """Total size of the CPU's last-level caches; None if the system does not report them.

    ``root`` replaces the file system's root in tests.
    """
    size_of: dict[tuple[int, str], int] = {}
    for index in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        size = re.fullmatch(r"(\d{1,9})K", _text(index / "size").strip())
        level = _text(index / "level").strip()
        if size is not None and level.isdecimal():
            cores = _text(index / "shared_cpu_list").strip() or str(index)
            size_of[int(level), cores] = int(size[1]) * 1024
    last = max((level for level, _ in size_of), default=0)
    return sum(size for (level, _), size in size_of.items() if level == last) or None


def _group_limits(root: Path) -> Iterable[int]:
    """Memory limits of this process's control groups, version 1 or 2."""
    own = [line.split(":", 2)[-1] for line in _text(root / "proc/self/cgroup").splitlines()]
    base = root / "sys/fs/cgroup"
    # Inside a container the group's own path may be mounted as the root, hence the empty path.
    for group in dict.fromkeys(("", *own)):
        path = group.strip("/")
        for file in (base / path / "memory.max", base / "memory" / path / "memory.limit_in_bytes"):
            text = _text(file).strip()
            if text.isdecimal():
                yield int(text)


def _memory_by_sysconf() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 2**33


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
