"""Accelerators of a cluster by device type and host, in groups for parallel configs.

Tensor-parallel ranks exchange the most data and therefore stay on one host: a host with 8 devices
has two groups of 4 or one of 6. All replicas of a stage and their tensor-parallel ranks are of one
device type, so none waits for a slower one; different types meet only at the borders of pipeline
stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice

from hocket.base.errors import UsageError
from hocket.hardware.cluster import Cluster, Device, DeviceKind
from hocket.plan.problem import Problem
from hocket.plan.transformer_plan import cluster_of_kind


@dataclass(frozen=True, eq=False)
class Pool:
    """Accelerators of one device type."""

    kind: DeviceKind
    hosts: tuple[tuple[Device, ...], ...]
    """Devices of this type on each host that has any."""
    spare: float = 0.0
    """Fraction of a device's memory that is kept free."""

    @cached_property
    def num_devices(self) -> int:
        """Number of devices of this type."""
        return sum(len(devices) for devices in self.hosts)

    @cached_property
    def per_host(self) -> int:
        """Number of devices on the host that has the most."""
        return max(len(devices) for devices in self.hosts)

    @cached_property
    def memory_bytes(self) -> int:
        """Usable bytes of the device with the least memory."""
        return min(device.memory_bytes for devices in self.hosts for device in devices)

    @cached_property
    def limit_bytes(self) -> int:
        """Bytes that a config may fill of `memory_bytes`."""
        return int((1 - self.spare) * self.memory_bytes)

    def num_groups(self, tensor: int) -> int:
        """Number of tensor-parallel groups of a size.

        A group that is larger than a host uses entire hosts with equally many devices.
        """
        if tensor <= self.per_host:
            return sum(len(devices) // tensor for devices in self.hosts)
        # Groups larger than a host need hosts of equal size, or ranks would have unequal links.
        if tensor % self.per_host or any(len(d) != self.per_host for d in self.hosts):
            return 0
        return self.num_devices // tensor

    def groups(self, tensor: int) -> list[tuple[str, ...]]:
        """Names of the devices of each tensor-parallel group, host by host."""
        if tensor > self.per_host:
            runs = [tuple(device.name for host in self.hosts for device in host)]
        else:
            runs = [tuple(device.name for device in host) for host in self.hosts]
        return [
            run[start : start + tensor]
            for run in runs
            for start in range(0, len(run) - tensor + 1, tensor)
        ]


def accelerators(cluster: Cluster) -> list[Device]:
    """Devices that train: CPUs only if there is nothing else."""
    devices = [d for d in cluster.devices if not d.kind.is_cpu] or list(cluster.devices)
    if not devices:
        raise UsageError("there are no devices to train on", where=cluster.name)
    return devices


@lru_cache(maxsize=8)
def pools_of(problem: Problem) -> tuple[Pool, ...]:
    """Pools of a cluster in order of first appearance; CPUs only if there is no accelerator."""
    found: dict[str, dict[str, list[Device]]] = {}
    for device in accelerators(problem.cluster):
        found.setdefault(device.kind.name, {}).setdefault(device.host, []).append(device)
    return tuple(
        Pool(
            next(iter(hosts.values()))[0].kind,
            # Fuller hosts first, so that groups rarely end up on the remains of a host.
            tuple(tuple(own) for own in sorted(hosts.values(), key=len, reverse=True)),
            problem.spare,
        )
        for hosts in found.values()
    )


@lru_cache(maxsize=8)
def pool_clusters(problem: Problem) -> tuple[Cluster, ...]:
    """For each pool, the cluster reduced to the pool's devices."""
    return tuple(cluster_of_kind(problem.cluster, pool.kind.name) for pool in pools_of(problem))


def rank_devices(
    pools: tuple[Pool, ...], ranks_of_pool: tuple[int, ...], tensor: int, num_groups: int
) -> tuple[tuple[str, ...], ...]:
    """Names of the devices of each pipeline rank.

    Entry ``i`` of ``pools`` provides the next ``ranks_of_pool[i]`` ranks of ``num_groups`` groups
    each. If a pool occurs again, it continues with its next groups.
    """
    # Iterators continue where the last run of the same pool stopped.
    groups = {pool: iter(pool.groups(tensor)) for pool in pools}
    return tuple(
        tuple(name for group in islice(groups[pool], num_groups) for name in group)
        for pool, num_ranks in zip(pools, ranks_of_pool, strict=True)
        for _ in range(num_ranks)
    )
