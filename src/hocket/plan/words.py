"""Shares of a batch in plain words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from hocket.plan.sections import Replica, Shares

_FEW = 4
"""Up to so many replicas stand one by one."""


def in_words(shares: Shares) -> str:
    """``data parallel 11 + 5 samples on rtx3090 and v100, recompute 4 blocks on v100``."""
    return "".join((_shared(shares), *_eased(shares.replicas)))


def _eased(replicas: Sequence[Replica]) -> Iterator[str]:
    """What is done to hold less, and where."""
    for count, members in _grouped(replicas, lambda r: len(r.recomputed)):
        yield f", recompute {count} block{'s' * (count > 1)}{_where(members, replicas)}"
    for _, members in _grouped(replicas, lambda r: int(r.update == "host")):
        yield f", updates on the host{_where(members, replicas)}"


def _grouped(
    replicas: Sequence[Replica], number_of: Callable[[Replica], int]
) -> list[tuple[int, list[Replica]]]:
    """Replicas by a number that they have, without those that have none."""
    numbers = sorted({number_of(replica) for replica in replicas} - {0})
    return [(n, [replica for replica in replicas if number_of(replica) == n]) for n in numbers]


def _where(members: Sequence[Replica], replicas: Sequence[Replica]) -> str:
    if len(members) == len(replicas):
        return " each" if len(replicas) > 1 else ""
    return f" on {_places(members)}"


def _shared(shares: Shares) -> str:
    replicas = shares.replicas
    if shares.tensor > 1:
        return _divided(shares)
    if len(replicas) == 1:
        return _alone(replicas[0], shares.schedule)
    how = "sharded data parallel" if shares.sharded else "data parallel"
    parts = [how, _samples(replicas), "samples on", _places(replicas)]
    split = [r for r in replicas if len(r.microbatches) > 1]
    text = " ".join(parts)
    if not split:
        return text
    if len({_sizes(r) for r in replicas}) == 1:
        return f"{text}, {_sizes(replicas[0])} each"
    told = [f"{_sizes(r)} on {_place(r)}" for r in split[:_FEW]]
    return f"{text}, {_listed(told)}" + (", …" if len(split) > _FEW else "")


def _divided(shares: Shares) -> str:
    """Groups of devices that divide matrices between them."""
    replicas = shares.replicas
    groups = [" + ".join(replica.devices) for replica in replicas]
    listed = _listed(groups) if len(groups) <= _FEW else f"{groups[0]}, … {groups[-1]}"
    sizes = f", {_sizes(replicas[0])} each" if len(replicas[0].microbatches) > 1 else ""
    if len(replicas) == 1:
        return f"tensor parallel over {listed}{sizes}"
    return f"data parallel {_samples(replicas)} samples, tensor parallel over {listed}{sizes}"


def _alone(replica: Replica, schedule: str) -> str:
    sizes = f", {_sizes(replica)}" if len(replica.microbatches) > 1 else ""
    if len(replica.devices) == 1:
        return f"{replica.devices[0]} alone{sizes}"
    named = " (GPipe)" if schedule == "gpipe" else ""
    return f"pipeline{named} over {_place(replica)}{sizes}"


def _samples(replicas: Sequence[Replica]) -> str:
    numbers = [replica.num_samples for replica in replicas]
    if len(numbers) <= _FEW:
        return " + ".join(str(number) for number in numbers)
    runs = [(number, len(list(run))) for number, run in groupby(numbers)]
    return " + ".join(f"{count} x {number}" for number, count in runs)


def _places(replicas: Sequence[Replica]) -> str:
    if len(replicas) <= _FEW:
        return _listed([_place(replica) for replica in replicas])
    return f"{_place(replicas[0])}, {_place(replicas[1])}, … {_place(replicas[-1])}"


def _place(replica: Replica) -> str:
    return " > ".join(replica.devices)


def _sizes(replica: Replica) -> str:
    sizes = replica.microbatches
    if len(sizes) == 1:
        return "1 microbatch"
    if len(set(sizes)) == 1:
        return f"{len(sizes)} microbatches of {sizes[0]}"
    return f"{len(sizes)} microbatches of {min(sizes)} and {max(sizes)}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
