"""Machines from the JSON of other programs: lists of links, TACCL's profiles, TE-CCL's inputs.

TE-CCL's inputs only name a topology, whose links are stated in its documentation and program; they
are written down here as facts: cube meshes, NVSwitch boxes, Infinity Fabric and meshes, with
one-way links between chassis where it has them. Nothing that a file says is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.base import fields
from hocket.base.errors import InputFileError, unknown_name
from hocket.base.jsonfile import read_json
from hocket.hardware.files import MAX_FILE_BYTES, Machine, machine_from_dict

# NDv2 as TE-CCL and TACCL number it: pairs with two NVLinks and with one.
_DOUBLE = ((0, 1), (0, 4), (1, 3), (2, 3), (2, 6), (4, 5), (5, 7), (6, 7))
_SINGLE = ((0, 2), (0, 3), (1, 2), (1, 5), (3, 7), (4, 6), (4, 7), (5, 6))
_MI250 = (
    (0, 1, 4), (0, 4, 2), (0, 8, 1), (1, 5, 1), (1, 9, 1), (1, 10, 1), (2, 3, 4), (2, 6, 1),
    (2, 9, 1), (2, 10, 1), (3, 7, 2), (3, 11, 1), (4, 5, 4), (4, 6, 1), (5, 6, 1), (5, 7, 1),
    (6, 7, 4), (8, 9, 4), (8, 12, 2), (9, 13, 1), (10, 11, 4), (10, 14, 1), (11, 15, 2),
    (12, 13, 4), (12, 14, 1), (13, 14, 1), (13, 15, 1), (14, 15, 4),
)  # fmt: skip
_LATENCY_S = 2e-6
_MAX_GPUS = 4096
Links = list[dict[str, Any]]


def read_json_machine(path: str | Path, name: str = "") -> Machine:
    """The machine of a JSON file; ``name`` picks one where a file holds several."""
    where = str(path)
    data = read_json(Path(path), max_bytes=MAX_FILE_BYTES)
    with fields.located(where):
        found = fields.mapping(data, "the file")
        if "devices" in found:
            return machine_from_dict(found, where, default_name=Path(path).stem)
        if "TopologyParams" in found:
            return machine_from_dict(_teccl(found), where, default_name=Path(path).stem)
        if "gpus_per_node" in found:
            return machine_from_dict(_taccl(found), where, default_name=Path(path).stem)
        if "gpus" in found:
            return machine_from_dict(_link_list(found, "the file"), where, Path(path).stem)
        known = [key for key, value in found.items() if isinstance(value, Mapping)]
        if name not in known:
            if name or not known:
                raise unknown_name("topology", name, known, where=where)
            raise InputFileError(
                "holds several topologies", hint=f"name one: {path}#{known[0]}", where=where
            )
        return machine_from_dict(_link_list(found[name], name), where, default_name=name)


def _machine(gpus: int, switches: list[str], links: Links, kind: str) -> dict[str, Any]:
    return {
        "devices": [{"kind": kind, "count": gpus}],
        "switches": switches,
        "links": links,
    }


def _link(a: str, b: str, gbps: float, latency_s: float, duplex: str = "full") -> dict[str, Any]:
    return {"ends": [a, b], "bandwidth": gbps * 1e9, "latency": latency_s, "duplex": duplex}


def _link_list(data: Any, path: str) -> dict[str, Any]:
    """``gpus`` with ``edges`` (pairs and numbers of links) or with a switch that joins all."""
    entry = fields.mapping(data, path)
    gpus = fields.integer(entry.get("gpus"), f"{path}.gpus", 1, _MAX_GPUS)
    links: Links = []
    if "edges" in entry:
        gbps = _nominal(entry.get("bw_per_link", 50), f"{path}.bw_per_link")
        for index, edge in enumerate(fields.items(entry["edges"], f"{path}.edges")):
            place = f"{path}.edges[{index}]"
            a, b, count = fields.int_column(edge, place, 0, _MAX_GPUS).tolist()[:3] + [0] * (
                3 - len(edge)
            )
            if not (a < gpus and b < gpus and a != b and count >= 1):
                raise fields.wrong(place, edge, "two different GPUs and a number of links")
            links.append(_link(f"gpu{a}", f"gpu{b}", gbps * count, _LATENCY_S))
    switches = fields.text_column(entry.get("switches", []), f"{path}.switches")
    if switches:
        gbps = _nominal(entry.get("gpu_switch_bw", 0), f"{path}.gpu_switch_bw")
        links += [_link(f"gpu{g}", switches[0], gbps, _LATENCY_S / 2) for g in range(gpus)]
    machine = _machine(gpus, switches, links, "v100-16g")
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


def _taccl(data: Mapping[str, Any]) -> dict[str, Any]:
    """A profile: times in µs and µs per MB, of the links of an NDv2 or a DGX-2."""
    gpus = fields.integer(data["gpus_per_node"], "gpus_per_node", 1, _MAX_GPUS)
    alpha_s = fields.number(data.get("alpha", 0), "alpha", 0, 1e6) * 1e-6
    betas = fields.float_column(data.get("node_betas_list"), "node_betas_list", 1e-6, 1e9)
    rates = (1e3 / betas).tolist()
    if gpus == 8 and len(rates) == 2:
        switches: list[str] = []
        links = [_link(f"gpu{a}", f"gpu{b}", rates[0], alpha_s) for a, b in _DOUBLE]
        links += [_link(f"gpu{a}", f"gpu{b}", rates[1], alpha_s) for a, b in _SINGLE]
    else:
        switches = ["nvswitch"]
        links = [_link(f"gpu{g}", "nvswitch", rates[0], alpha_s / 2) for g in range(gpus)]
    cards = fields.integer(data.get("nics_per_node", 1), "nics_per_node", 1, gpus)
    remote_s = fields.number(data.get("remote_alpha", 0), "remote_alpha", 0, 1e6) * 1e-6
    beta = fields.number(data.get("remote_beta", 100), "remote_beta", 1e-6, 1e9)
    for card in range(cards):
        switches.append(f"nic{card}")
        share = range(card * gpus // cards, (card + 1) * gpus // cards)
        links += [_link(f"gpu{g}", f"nic{card}", 1e3 / beta, remote_s / 2) for g in share]
    machine = _machine(gpus, switches, links, "v100-16g")
    at = [f"nic{card}" for card in range(cards)]
    machine["network"] = {"at": at, "bandwidth": 1e12 / beta, "latency": remote_s / 2}
    return machine


def _teccl(data: Mapping[str, Any]) -> dict[str, Any]:
    params = fields.mapping(data["TopologyParams"], "TopologyParams")
    name = fields.text(params.get("name"), "TopologyParams.name")
    chassis = fields.integer(params.get("chassis", 1), "TopologyParams.chassis", 1, 256)
    alphas = fields.float_column(params.get("alpha", [0.0, 0.0]), "TopologyParams.alpha", 0, 1)
    near_s, far_s = ([*alphas.tolist(), 0.0, 0.0])[:2]
    if name == "NDv2":
        return _ndv2(chassis)
    if name == "DGX2":
        return _dgx2(chassis)
    if name == "AMD":
        return _amd(chassis, near_s, far_s)
    if name == "Mesh":
        side = fields.integer(params.get("side_length"), "TopologyParams.side_length", 2, 64)
        gpus = side * side
        pairs = [(a, a + step) for step in (1, side) for a in range(gpus - step)]
        return _machine(
            gpus, [], [_link(f"gpu{a}", f"gpu{b}", 100.0, near_s) for a, b in pairs], "v100-16g"
        )
    raise unknown_name("topology", name, ("NDv2", "DGX2", "AMD", "Mesh"))


def _ndv2(chassis: int) -> dict[str, Any]:
    """Cube meshes; GPU 0 of each sends to GPU 1 of others at 12.5 GB/s."""
    links: Links = []
    for box in range(chassis):
        first = 8 * box
        for pairs, gbps in ((_DOUBLE, 50.0), (_SINGLE, 25.0)):
            links += [_link(f"gpu{first + a}", f"gpu{first + b}", gbps, 7e-7) for a, b in pairs]
    if chassis == 2:
        links += [_link("gpu0", "gpu9", 12.5, 1.3e-6, "one-way"),
                  _link("gpu8", "gpu1", 12.5, 1.3e-6, "one-way")]  # fmt: skip
        return _machine(16, [], links, "v100-16g")
    for box in range(chassis if chassis > 2 else 0):
        links.append(_link(f"gpu{8 * box}", "ib", 12.5, 1.3e-6, "one-way"))
        links.append(_link("ib", f"gpu{8 * box + 1}", 12.5, 1.3e-6, "one-way"))
    return _machine(8 * chassis, ["ib"] if chassis > 2 else [], links, "v100-16g")


def _dgx2(chassis: int) -> dict[str, Any]:
    """NVSwitch boxes of 16; each odd GPU sends to the even one before it in the other box."""
    links = [_link(f"gpu{g}", f"nvswitch{g // 16}", 125.0, 3.5e-7) for g in range(16 * chassis)]
    for box in range(chassis):
        for other in range(chassis):
            if box != other:
                links += [
                    _link(f"gpu{16 * box + g}", f"gpu{16 * other + g - 1}", 12.5, 2.6e-6, "one-way")
                    for g in range(1, 16, 2)
                ]
    return _machine(16 * chassis, [f"nvswitch{box}" for box in range(chassis)], links, "v100-32g")


def _amd(chassis: int, near_s: float, far_s: float) -> dict[str, Any]:
    """Sixteen dies of MI250; a switch for two of them and one above all, at 25 GB/s."""
    links: Links = []
    switches: list[str] = []
    for box in range(chassis):
        first = 16 * box
        links += [
            _link(f"gpu{first + a}", f"gpu{first + b}", 50.0 * n, near_s) for a, b, n in _MI250
        ]
        for pair in range(8 if chassis > 1 else 0):
            switch = f"nic{8 * box + pair}"
            switches.append(switch)
            links += [
                _link(f"gpu{first + 2 * pair + half}", switch, 25.0, far_s) for half in range(2)
            ]
            links.append(_link(switch, "ib", 25.0, far_s))
    return _machine(16 * chassis, [*switches, "ib"] if chassis > 1 else [], links, "mi250-64g")
