"""Detect the Cluster of this machine: its NVIDIA GPUs and their links, or else its CPU.

GPUs are what ``nvidia-smi`` reports; known models take the figures of the presets. A CPU is
timed with numpy for under a second, and where it is several devices, so is a connection between two
processes. Machines with GPUs get no device for the CPU, but its updates are timed.
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
from hocket.hardware.kinds import preset_kinds
from hocket.hardware.topology import DevicePort, gpu_links, parse_topology
from hocket.processes.start import start_module

# How fast two processes of this machine talk to each other: bytes per second, cost of a message.
#
# A child sends back what it gets over a loopback connection, as gloo's ranks do. The shortest round
# trip of one byte gives the cost of a message, the shortest of a large one the bandwidth; other
# programs only lengthen them. Gloo hands every message to a thread of its own and back.

GLOO_MESSAGE_S = 50e-6
"""Overhead of gloo per message: 66 us against 16 us of a plain connection, measured beside each
other with PyTorch 2.13 on two cores."""
LARGE_BYTES = 8 * 10**6
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Loopback:
    """One direction between two processes."""

    bandwidth_bps: float
    message_s: float


def measure_loopback() -> Loopback | None:
    """The connection between two processes here; None where they cannot be joined."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(TIMEOUT_S)
            port = server.getsockname()[1]
            arguments = (str(port), str(LARGE_BYTES))
            with start_module(
                "hocket.processes.echo", arguments, output=subprocess.DEVNULL
            ) as child:
                try:
                    return _loopback_measured(server)
                finally:
                    child.kill()
    except OSError:
        return None


def _loopback_measured(server: socket.socket) -> Loopback:
    link, _ = server.accept()
    with link:
        link.settimeout(TIMEOUT_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = memoryview(bytearray(LARGE_BYTES))
        message_s = _one_direction_s(link, data[:1], 100)
        large_s = _one_direction_s(link, data, 8)
    bandwidth_bps = LARGE_BYTES / max(large_s - message_s, 1e-9)
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
                raise ConnectionError("the other process has ended")
            got += taken
        best_s = min(best_s, time.perf_counter() - start)
    return best_s / 2


NAME = "this-machine"

_QUERY = ("name", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
_MODELS = (
    (r"\bGB200\b", "gb200"),
    (r"\bB200\b", "b200"),
    (r"\bH200\b", "h200-141g"),
    (r"\bH100 NVL\b", "h100-nvl"),
    (r"\bH100 PCIe\b", "h100-pcie"),
    (r"\bH100\b.*\bHBM3\b", "h100-80g"),
    (r"\bA100[- ]PCI[eE][- ]40GB\b", "a100-pcie-40g"),
    (r"\bA100\b.*\bPCI[eE]\b", "a100-pcie"),
    (r"\bA100\b.*\b80GB\b", "a100-80g"),
    (r"\bA100\b.*\b40GB\b", "a100-40g"),
    (r"\bV100\b.*\b32GB\b", "v100-32g"),
    (r"\bV100\b.*\b16GB\b", "v100-16g"),
    (r"\bP100\b.*\b16GB\b", "p100-16g"),
    (r"\bK80\b", "k80"),
    (r"\bT4\b", "t4"),
    (r"\bL40S\b", "l40s"),
    (r"\bL4\b", "l4"),
    (r"\bRTX A6000\b", "a6000"),
    (r"\bA40\b", "a40"),
    (r"\bA10G\b", "a10g"),
    (r"\bRTX 5090\b(?! D| Laptop)", "rtx5090"),
    (r"\bRTX 5080\b(?! Laptop)", "rtx5080"),
    (r"\bRTX 5070\b(?! Ti| Laptop)", "rtx5070"),
    (r"\bRTX 4090\b(?! D| Laptop)", "rtx4090"),
    (r"\bRTX 4080\b(?! SUPER| Laptop)", "rtx4080"),
    (r"\bRTX 4070\b(?! Ti| SUPER| Laptop)", "rtx4070"),
    (r"\bRTX 4060\b(?! Ti| Laptop)", "rtx4060"),
    (r"\bRTX 3090\b(?! Ti)", "rtx3090"),
    (r"\bRTX 3080\b(?! Ti| Laptop)", "rtx3080"),
    (r"\bRTX 3070\b(?! Ti| Laptop)", "rtx3070"),
    (r"\bRTX 3060\b(?! Ti| Laptop)", "rtx3060"),
    (r"\bRTX 2080\b(?! Ti| SUPER)", "rtx2080"),
    (r"\bGTX TITAN X\b", "titanx-12g"),
)
_NVLINKS: Mapping[str, tuple[int, float]] = {
    "p100-16g": (4, 20e9),
    "v100-16g": (6, 25e9),
    "v100-32g": (6, 25e9),
    "a100-40g": (12, 25e9),
    "a100-80g": (12, 25e9),
    "h100-80g": (18, 25e9),
    "h200-141g": (18, 25e9),
    "rtx3090": (4, 14e9),
    "a6000": (4, 14e9),
    "a40": (4, 14e9),
}
_UNKNOWN_NVLINKS = (18, 25e9)
_LANE_BPS: Mapping[int, float] = {1: 1.875e8, 2: 3.75e8, 3: 7.5e8, 4: 1.5e9, 5: 3e9, 6: 6e9}
"""PCIe, one lane, one direction, as NCCL rates it."""
PROCESS_BYTES = 300_000_000
"""Host memory of a process with PyTorch before it holds anything."""


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi's answer."""

    model: str
    memory_bytes: int
    pcie_bps: float

    @property
    def preset(self) -> str | None:
        """Name of the kind with the figures of this model; None where it is not known."""
        return next((kind for pattern, kind in _MODELS if re.search(pattern, self.model)), None)

    @property
    def kind(self) -> str:
        """The preset, or else the model's name in small letters and hyphens."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.model.lower()).strip("-")
        return self.preset or slug or "gpu"


def detect(processes: int = 1) -> Cluster:
    """The cluster of this machine.

    With several ``processes`` the CPU is as many devices, which share its cores and memory
    and talk to each other as gloo's ranks do.
    """
    gpus = find_gpus() if processes == 1 else []
    if not gpus:
        return detect_cpu(processes)
    machine = gpu_machine(gpus, _nvidia_smi("topo", "-m"))
    update_bps = _BESIDE_TRAINING * measure_update_bps()
    return cluster_from_dict({**machine, "host_update": update_bps}, NAME)


def detect_cpu(processes: int = 1) -> Cluster:
    """The CPU of this machine as devices, whatever GPUs it has."""
    return cluster_from_dict(_cpu_machine(processes), NAME)


# ── GPUs ─────────────────────────────────────────────────────────────────────────────────────────


def find_gpus() -> list[Gpu]:
    """The GPUs of this machine in the order of nvidia-smi; none where it does not answer."""
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
    """GPUs in the text that nvidia-smi answers the query with, one per line."""
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        memory = re.fullmatch(r"(\d{1,9}) MiB", cells[1]) if len(cells) == len(_QUERY) else None
        if memory is None or int(memory[1]) == 0:
            continue
        generation, lanes = (int(cell) if cell.isdecimal() else 0 for cell in cells[2:])
        pcie_bps = _LANE_BPS.get(generation, _LANE_BPS[3]) * (lanes or 16)
        gpus.append(Gpu(cells[0], int(memory[1]) * 2**20, pcie_bps))
    return gpus


def gpu_machine(gpus: list[Gpu], topology_text: str) -> dict[str, Any]:
    """The hardware file of a machine with these GPUs."""
    kinds: dict[str, Any] = {}
    devices = []
    for gpu in gpus:
        kind = gpu.kind
        memory_bytes = gpu.memory_bytes
        if gpu.preset is not None:
            memory_bytes = min(memory_bytes, preset_kinds()[kind].kind.memory_bytes)
        elif kind not in kinds:
            kinds[kind] = _unknown_kind(gpu)
        devices.append({"kind": kind, "memory": f"{memory_bytes}B"})
    ports = [
        DevicePort(gpu.pcie_bps, per_link_bps, most)
        for gpu in gpus
        for most, per_link_bps in [_NVLINKS.get(gpu.preset or "", _UNKNOWN_NVLINKS)]
    ]
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
    """Headroom of a GPU of which nothing is stated, by the rule of ``presets/kinds.toml``.

    Context and libraries, 1 % for the driver, and a tenth of the tensors for fragmentation.
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
        "source": f"{gpu.model}: memory as reported; the rates are placeholders, correct them",
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
        "float64 taken as half"
    )
    kind = {
        "memory": f"{memory_bytes}B",
        "headroom": f"{min(PROCESS_BYTES, memory_bytes // 2)}B",
        "memory_bandwidth": bandwidth_bps,
        "peak": {"float32": flops, "float64": flops / 2},
        "launch": "2us",
        "cpu": True,
        # A message crosses the links of both its ends. Where there is one process, or they cannot
        # be joined, as the presets rate it: what arrives is written to memory and read again.
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
    """Operations and bytes per second of the CPU, to two digits: more would be noise.

    Like all that is measured here, once in a process: it takes half a second, and what is planned
    twice for the same cores should be planned for the same rates.
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


_BESIDE_TRAINING = 0.42
"""Of what cores do alone, what updates do while copies use the same memory and others start the
device's work: 58 to 69 of 137 GB/s with 16 cores beside an H200, for 1.5 and 4.2 B parameters. The
lower end, because a step that waits for a host which was overrated by a third takes 15 % longer,
and one that spares a host which was underrated so much 7 % (4.2 B parameters under 8 GiB)."""


def measure_update_bps() -> float:
    """Bytes per second that all cores together read and write in sums in place, to two digits.

    As an optimizer's update does: several values are read for each that is written, and what is
    written was read before. The arrays of each core are larger than its caches.
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
    """Shortest of the runs that fit into the budget, the first not counted: it warms up."""
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
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: of the machine, or what its control group allows.

    ``root`` replaces the file system's root in tests.
    """
    match = re.search(r"^MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    total = int(match[1]) * 1024 if match else _memory_by_sysconf()
    return max(min([total, *_group_limits(root)]), 2**20)


def available_bytes(root: Path = Path("/")) -> int:
    """Available memory, including file caches.

    ``root`` replaces the file system's root in tests. Where the system does not report it, all
    memory counts.
    """
    usable = usable_memory_bytes(root)
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return min(usable, int(match[1]) * 1024) if match else usable


def last_level_cache_bytes(root: Path = Path("/")) -> int | None:
    """All last-level caches of the CPU together; None where the system does not report them.

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
    """Limits of the control groups that hold this process, of either version."""
    own = [line.split(":", 2)[-1] for line in _text(root / "proc/self/cgroup").splitlines()]
    base = root / "sys/fs/cgroup"
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
