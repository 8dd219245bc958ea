"""The clusters that the published measurements were made on, as hocket describes hardware.

All are presets with the network that their owners state; only its bandwidth is changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from hocket.base.errors import unknown_name
from hocket.hardware.cluster import Cluster, Device
from hocket.hardware.shorthand import NETWORK, cluster_from_text


@dataclass(frozen=True)
class Site:
    """A kind of machine and its network."""

    machine: str
    network_bps: float
    """Bytes per second and host, each way."""
    source: str
    kind: tuple[str, float, float] | None = None
    """Name, memory and its bandwidth where the site's devices are not those of the preset."""


_B300 = ("b300", 268 * 2**30, 8e12)
"""288 GB of which 268 GiB are left, at 8 TB/s; arithmetic in 16 and 8 bits as in B200."""
_BLACKWELL = {
    f"bridge-{name}{part}": site
    for name, site in {
        "b200": Site("dgx-b200", 8 * 50e9, "DGX B200: eight adapters of 400 Gbit/s"),
        "b300": Site("dgx-b200", 8 * 100e9, "DGX B300: eight adapters of 800 Gbit/s", kind=_B300),
        "gb200": Site("gb200-nvl72", 72 * 50e9, "400 Gbit/s per GPU beside NVLink"),
        "gb300": Site("gb200-nvl72", 72 * 100e9, "800 Gbit/s per GPU beside NVLink", kind=_B300),
    }.items()
    for part in ("", "-experts")
}
SITES = MappingProxyType(
    {
        "selene": Site("dgx-a100-80g", 8 * 25e9, "eight HDR adapters of 200 Gbit/s per DGX A100"),
        "jean-zay": Site("dgx-a100-80g", 4 * 12.5e9, "four Omni-Path adapters of 100 Gbit/s"),
        # Its network is stated as 800 Gbit/s per host; the size of its GPUs' memory is not stated.
        "vtrain": Site("dgx-a100-80g", 100e9, "800 Gbit/s per host, in the files of vTrain"),
        # One host alone is calibrated apart from the many: no run of it uses the network.
        "vtrain-host": Site("dgx-a100-80g", 100e9, "the same machines"),
        "eos": Site("dgx-h100", 8 * 50e9, "eight NDR adapters of 400 Gbit/s per DGX H100"),
        "dgxc": Site("dgx-h100", 8 * 50e9, "DGX H100 of the benchmarks of DGX Cloud"),
        # The same make of machine, apart from Eos: other programs, and years later.
        "bridge": Site("dgx-h100", 8 * 50e9, "DGX H100 of Megatron-Bridge's tables"),
        "bridge-experts": Site("dgx-h100", 8 * 50e9, "the same, mixtures of experts"),
        **_BLACKWELL,
        "mosaic-h100": Site("dgx-h100", 8 * 50e9, "eight adapters of 400 Gbit/s per host"),
        "mosaic-a100-80g": Site("dgx-a100-80g", 200e9, "1600 Gbit/s per host, stated"),
        "mosaic-a100-40g": Site("dgx-a100-40g", 200e9, "1600 Gbit/s per host, stated"),
        "titan-h100": Site(
            "dgx-h100",
            8 * 50e9,
            "H100 with 96 GB of HBM2e at 2.4 TB/s and 500 W, 400 Gbit/s per GPU, stated",
            kind=("h100-96g-500w", 95 * 2**30, 2.4e12),
        ),
        "titan-h200": Site("hgx-h200", 8 * 50e9, "H200, 400 Gbit/s per GPU"),
        "dgx2": Site("dgx2", 8 * 12.5e9, "eight adapters of 100 Gbit/s per DGX-2"),
        "dgx-a100-2020": Site("dgx-a100-40g", 8 * 25e9, "the first DGX A100, 40 GB per GPU"),
    }
)
"""Sites by the name that the tables use."""


@lru_cache(maxsize=64)
def site_cluster(name: str, num_devices: int) -> Cluster:
    """The least number of a site's hosts that hold ``num_devices`` devices."""
    if name not in SITES:
        raise unknown_name("site", name, SITES)
    site = SITES[name]
    per_host = cluster_from_text(site.machine).num_devices
    num_hosts = max(1, -(-num_devices // per_host))
    cluster = cluster_from_text(f"{num_hosts}x{site.machine}")
    num_links = sum(NETWORK in link.ends for link in cluster.links) // num_hosts
    return replace(
        cluster,
        name=f"{num_hosts} hosts of {name}",
        devices=_devices(cluster, site),
        links=tuple(
            replace(link, bandwidth_bps=site.network_bps / num_links)
            if NETWORK in link.ends
            else link
            for link in cluster.links
        ),
    )


def _devices(cluster: Cluster, site: Site) -> tuple[Device, ...]:
    if site.kind is None:
        return cluster.devices
    name, memory_bytes, bandwidth_bps = site.kind
    kind = replace(
        cluster.devices[0].kind,
        name=name,
        memory_bytes=round(memory_bytes),
        memory_bandwidth_bps=bandwidth_bps,
        source=site.source,
    )
    return tuple(
        replace(device, kind=kind, memory_bytes=kind.memory_bytes) for device in cluster.devices
    )
