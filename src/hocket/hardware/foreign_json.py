"""Read a machine from JSON: a hardware file as JSON, or the GPUs of a machine with their links.

The second form has ``gpus`` and either ``edges`` (pairs of GPUs with their number of links) or
``switches``, the first of which joins all GPUs. A file may hold several such machines by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.base import fields
from hocket.base.errors import InputFileError, unknown_name
from hocket.base.jsonfile import read_json
from hocket.hardware.files import MAX_FILE_BYTES, Machine, machine_from_dict

_LATENCY_S = 2e-6
_MAX_GPUS = 4096


def read_json_machine(path: str | Path, name: str = "") -> Machine:
    """The machine of a JSON file; ``name`` selects one if the file holds several."""
    where = str(path)
    data = read_json(Path(path), max_bytes=MAX_FILE_BYTES)
    with fields.located(where):
        found = fields.mapping(data, "the file")
        if "devices" in found:
            return machine_from_dict(found, where, default_name=Path(path).stem)
        if "gpus" in found:
            return machine_from_dict(_link_list(found, "the file"), where, Path(path).stem)
        known = [key for key, value in found.items() if isinstance(value, Mapping)]
        if name not in known:
            if name or not known:
                raise unknown_name("topology", name, known, where=where)
            raise InputFileError(
                "holds several machines", hint=f"name one: {path}#{known[0]}", where=where
            )
        return machine_from_dict(_link_list(found[name], name), where, default_name=name)


def _link(a: str, b: str, gbps: float, latency_s: float) -> dict[str, Any]:
    return {"ends": [a, b], "bandwidth": gbps * 1e9, "latency": latency_s}


def _link_list(data: Any, path: str) -> dict[str, Any]:
    """Convert the second form to the schema of the hardware files."""
    entry = fields.mapping(data, path)
    gpus = fields.integer(entry.get("gpus"), f"{path}.gpus", 1, _MAX_GPUS)
    links: list[dict[str, Any]] = []
    if "edges" in entry:
        gbps = _nominal(entry.get("bw_per_link", 50), f"{path}.bw_per_link")
        for index, edge in enumerate(fields.items(entry["edges"], f"{path}.edges")):
            place = f"{path}.edges[{index}]"
            a, b, count = (*fields.int_column(edge, place, 0, _MAX_GPUS).tolist(), 0, 0, 0)[:3]
            if not (a < gpus and b < gpus and a != b and count >= 1):
                raise fields.wrong(place, edge, "two different GPUs and a number of links")
            links.append(_link(f"gpu{a}", f"gpu{b}", gbps * count, _LATENCY_S))
    switches = fields.text_column(entry.get("switches", []), f"{path}.switches")
    if switches:
        gbps = _nominal(entry.get("gpu_switch_bw", 0), f"{path}.gpu_switch_bw")
        links += [_link(f"gpu{g}", switches[0], gbps, _LATENCY_S / 2) for g in range(gpus)]
    machine: dict[str, Any] = {
        "devices": [{"kind": "v100-16g", "count": gpus}],
        "switches": switches,
        "links": links,
    }
    card = entry.get("nic_bw", entry.get("nic_bw_per_gpu"))
    if card is not None:
        gbps = _nominal(card, f"{path}.nic_bw")
        at = [f"gpu{g}" for g in range(gpus)]
        machine["network"] = {"at": at, "bandwidth": gbps * 1e9, "latency": 2.5e-6}
    return machine


def _nominal(value: Any, path: str) -> float:
    """A rate in GB/s, or the nominal (else the first) of several."""
    if isinstance(value, Mapping):
        value = value.get("nominal", next(iter(value.values()), 0))
    return fields.number(value, path, 1e-3, 1e5)
