"""Files of other programs that describe a machine: which reader reads which."""

from __future__ import annotations

from pathlib import Path

from hocket.base.errors import InputFileError
from hocket.base.fields import shown
from hocket.base.regular import read_regular
from hocket.hardware.files import MAX_FILE_BYTES, Machine, machine_from_dict, read_machine
from hocket.hardware.topology import DevicePort, gpu_links, parse_topology

SUFFIXES = (".toml", ".xml", ".json", ".txt")
"""Endings of the names of files that can stand for a machine."""
# From how many NVLinks per GPU on which generation it is: its kind, and one link's rate.
_GENERATIONS = ((13, "h100-80g", 25e9), (7, "a100-40g", 25e9), (5, "v100-16g", 25e9),
                (1, "p100-16g", 20e9), (0, "v100-16g", 25e9))  # fmt: skip
_PCIE_BPS = 12e9


def is_machine_file(text: str) -> bool:
    """Whether a name is that of a file, by its ending."""
    return text.partition("#")[0].endswith(SUFFIXES)


def read_any_machine(text: str) -> Machine:
    """The machine of a TOML file, a topology dump, a matrix or JSON (``file.json#name``)."""
    path, _, name = text.partition("#")
    if path.endswith(".xml"):
        from hocket.hardware.nccl_xml import read_nccl_machine

        return read_nccl_machine(path)
    if path.endswith(".json"):
        from hocket.hardware.foreign_json import read_json_machine

        return read_json_machine(path, name)
    if path.endswith(".txt"):
        return read_matrix(path)
    return read_machine(text)


def read_matrix(path: str | Path) -> Machine:
    """The machine of what ``nvidia-smi topo -m`` prints; the generation follows from the links."""
    where = str(path)
    try:
        text = read_regular(path, MAX_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputFileError("is not text in UTF-8", where=where) from None
    # Copied text often has spaces where the program prints tabs.
    tabbed = text if "\t" in text else "\n".join("\t".join(x.split()) for x in text.splitlines())
    gpus = sum(line.strip().startswith("GPU") for line in tabbed.splitlines())
    counts = range(min(gpus, 256), 0, -1)
    topology = next((t for n in counts if (t := parse_topology(_aligned(tabbed), n))), None)
    if topology is None:
        raise InputFileError(
            "holds no matrix of GPUs",
            hint="save what nvidia-smi topo -m prints, header line included",
            where=where,
        )
    if (odd := topology.odd_cell()) is not None:
        src, dst = odd
        raise InputFileError(
            f"GPU{src} and GPU{dst} are joined by {shown(topology.relation[src][dst])}",
            hint="NVLinks are told as NV and their number, such as NV2",
            where=where,
        )
    size = range(len(topology.relation))
    direct = max(topology.num_nvlinks(a, b) for a in size for b in size)
    total = max(sum(topology.num_nvlinks(a, b) for b in size) for a in size)
    # With a switch every pair shows all links of a GPU, so their sum says nothing.
    per_gpu = direct if total > 18 else total
    kind, link_bps = next((k, bps) for least, k, bps in _GENERATIONS if per_gpu >= least)
    ports = [DevicePort(_PCIE_BPS, link_bps, max(per_gpu, 1)) for _ in size]
    data = {"devices": [{"kind": kind, "count": len(ports)}], "hosts": ["host"]}
    return machine_from_dict(
        {**data, **gpu_links(topology, ports)}, where, default_name=Path(path).stem
    )


def _aligned(text: str) -> str:
    """The matrix with its header above its columns: a header that begins with GPU0 lacks a cell."""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if line.lstrip().startswith("GPU0") and "GPU1" in line and not line.startswith("\t"):
            following = next((x for x in lines[index + 1 :] if x.strip().startswith("GPU0")), "")
            if following and line.split("\t")[0].strip() == "GPU0":
                lines[index] = "\t" + line
                break
    return "\n".join(lines)
