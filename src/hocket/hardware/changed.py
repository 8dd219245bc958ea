"""Change a cluster: ``+1xrtx4090`` adds devices, ``-titanx`` removes some, ``4xl4`` replaces all.

Added devices are placed in the first host, each on the usual PCIe link of its type. Devices to
remove are given by name, or by a count and a type; the last ones of a type are removed first.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hocket.base.errors import UsageError, did_you_mean
from hocket.hardware.cluster import Cluster, Link
from hocket.hardware.shorthand import cluster_from_text

_COUNT_AND_NAME = re.compile(r"(?:([0-9]{1,9})x)?(.+)")


def changed_cluster(cluster: Cluster, change: str) -> Cluster:
    """The cluster after a change; raises `UsageError` for an impossible change."""
    text = change.strip()
    if text.startswith("+"):
        return _with(cluster, text)
    if text.startswith("-"):
        return _without(cluster, text)
    return cluster_from_text(text)


def _with(cluster: Cluster, change: str) -> Cluster:
    if cluster.uses_stated_times or not cluster.hosts:
        raise UsageError(
            f"no device can be added to {cluster.name}: its transfer times come from a graph file",
            hint="name another cluster",
        )
    added, host = cluster_from_text(change[1:]), cluster.hosts[0]
    if len(added.hosts) != 1 or added.switches:
        raise UsageError(
            f"{change!r} names more than the devices of one host",
            hint="add devices, such as +1xrtx4090, or name a whole cluster instead",
        )
    taken, names = set(cluster.device_names), dict[str, str]()
    for device in added.devices:
        number = 0
        while f"new{number}" in taken:
            number += 1
        names[device.name] = f"new{number}"
        taken.add(f"new{number}")
    names[added.hosts[0]] = host
    # The cluster's own device type of that name wins: it may carry measured figures.
    known = {kind.name: kind for kind in cluster.kinds}
    devices = tuple(
        replace(d, name=names[d.name], host=host, kind=known.get(d.kind.name, d.kind))
        for d in added.devices
    )
    links = tuple(_renamed(link, names) for link in added.links)
    return replace(
        cluster, name=f"{cluster.name}{change.replace(' ', '')}",
        devices=(*cluster.devices, *devices), links=(*cluster.links, *links),
    )  # fmt: skip


def _renamed(link: Link, names: dict[str, str]) -> Link:
    ends = tuple(names[end] for end in link.ends)
    return replace(link, name="-".join(ends), ends=ends)


def _without(cluster: Cluster, change: str) -> Cluster:
    match = _COUNT_AND_NAME.fullmatch(change[1:].strip())
    count, name = (1, "") if match is None else (int(match[1] or 1), match[2])
    alike = [d for d in cluster.devices if name in (d.name, d.kind.name)]
    if not alike:
        known = {name for d in cluster.devices for name in (d.name, d.kind.name)}
        raise UsageError(
            f"{cluster.name} has no device {name[:100]!r} to remove",
            hint=did_you_mean(name[:100], sorted(known)),
        )
    if not 1 <= count <= len(alike) or count == cluster.num_devices:
        raise UsageError(
            f"{count} of {name!r} cannot be removed from {cluster.name}",
            hint=f"it has {len(alike)}, and one device must stay",
        )
    gone = {device.name for device in alike[-count:]}
    kept = cluster.only([name for name in cluster.device_names if name not in gone])
    return replace(kept, name=f"{cluster.name}{change.replace(' ', '')}")
