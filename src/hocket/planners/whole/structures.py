"""Which devices hold the model together: all ways for few devices, the sensible ones for many.

A structure is a set of groups of devices; each group holds the model once, its devices in the order
of their stages. Devices of one kind with the same links are exchangeable, so of ways that differ
only by them the first is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from hocket.planners.whole.tables import Tables

Structure = tuple[tuple[int, ...], ...]
FEW_DEVICES = 4
"""Up to so many devices every set of groups in every order is considered."""
_MOST_STAGES = 8


def structures(tables: Tables, devices: list[int]) -> list[Structure]:
    """Sets of groups, each once up to exchangeable devices, small ones first."""
    found = _all_sets(devices) if len(devices) <= FEW_DEVICES else _sensible(tables, devices)
    alike = {device: _class_of(tables, device) for device in devices}
    seen: dict[object, Structure] = {}
    for structure in found:
        if structure:
            key = tuple(sorted(tuple(alike[d] for d in group) for group in structure))
            seen.setdefault(key, structure)
    return sorted(seen.values(), key=lambda s: (sum(map(len, s)), len(s), s))


def _class_of(tables: Tables, device: int) -> tuple[object, ...]:
    problem = tables.problem
    bandwidth = sorted(problem.costs.routes.bandwidth_bps[device].tolist())
    return tables.row(device), int(problem.memory_bytes[device]), tuple(bandwidth)


def _all_sets(devices: list[int]) -> Iterator[Structure]:
    """Every set of ordered groups of some of the devices."""
    if not devices:
        yield ()
        return
    last = devices[-1]
    for rest in _all_sets(devices[:-1]):
        yield rest
        yield (*rest, (last,))
        for index, group in enumerate(rest):
            for at in range(len(group) + 1):
                grown = (*group[:at], last, *group[at:])
                yield (*rest[:index], grown, *rest[index + 1 :])


def _sensible(tables: Tables, devices: list[int]) -> Iterator[Structure]:
    """The quickest devices as replicas, as one pipeline, or as replicas of pipelines."""
    quickest = sorted(devices, key=lambda d: (tables.passes_s[tables.row(d), -1, -1], d))
    roomy = sorted(devices, key=lambda d: (-int(tables.problem.memory_bytes[d]), d))
    for order in (quickest, devices, roomy):
        for count in sensible_counts(len(devices)):
            some = order[:count]
            yield tuple((device,) for device in some)
            if 1 < count <= _MOST_STAGES:
                yield (tuple(some),)
                yield (tuple(reversed(some)),)
            for stages in range(2, min(count // 2, _MOST_STAGES) + 1):
                if count % stages == 0:
                    yield _chunks(some, stages)
                    yield tuple(tuple(some[i :: count // stages]) for i in range(count // stages))


def _chunks(devices: list[int], stages: int) -> Structure:
    return tuple(tuple(devices[i : i + stages]) for i in range(0, len(devices), stages))


def sensible_counts(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, …, and all."""
    found, power = {1, 3, most}, 2
    while power <= most:
        found |= {power, power * 3 // 2}
        power *= 2
    return sorted(count for count in found if count <= most)
