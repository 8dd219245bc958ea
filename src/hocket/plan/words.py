"""One-line descriptions of parallel sections for users."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from hocket.plan.sections import Parallel, Replica

_SCHEDULES = {"1f1b": "", "gpipe": " (GPipe)", "zb-h1": " (ZB-H1)", "zb-h2": " (ZB-H2)"}
_FEW = 4
"""Largest number of replicas that are listed one by one."""


def in_words(parallel: Parallel) -> str:
    """Describe a parallel section in one line.

    For example ``DDP, 11 + 5 samples on rtx3090 and v100, recompute 4 blocks on v100``.
    """
    return "".join((_strategy(parallel), *_memory_savings(parallel)))


def _memory_savings(parallel: Parallel) -> Iterator[str]:
    """Yield the techniques that save memory, with the devices that use them."""
    for count, members in _grouped(parallel.replicas, lambda r: len(r.recomputed)):
        yield f", recompute {count} block{'s' * (count > 1)}{_where(members, parallel)}"
    for _, members in _grouped(parallel.replicas, lambda r: int(r.update == "host")):
        yield f", optimizer on the host{_where(members, parallel)}"


def _grouped(
    replicas: Sequence[Replica], number_of: Callable[[Replica], int]
) -> list[tuple[int, list[Replica]]]:
    """Group replicas by a number, without those for which it is 0."""
    numbers = sorted({number_of(replica) for replica in replicas} - {0})
    return [(n, [replica for replica in replicas if number_of(replica) == n]) for n in numbers]


def _where(members: Sequence[Replica], parallel: Parallel) -> str:
    if len(members) == len(parallel.replicas):
        return " each" if len(members) > 1 else ""
    return f" on {_places(members, parallel.tensor)}"


def _strategy(parallel: Parallel) -> str:
    replicas = parallel.replicas
    if parallel.tensor > 1:
        return _tensor_parallel(parallel)
    if len(replicas) == 1:
        return _one_replica(replicas[0], parallel.schedule)
    how = "FSDP" if parallel.sharded else "DDP"
    how += f" x pipeline{_SCHEDULES[parallel.schedule]}" if parallel.is_staged else ""
    parts = [f"{how},", _samples(replicas), "samples on", _places(replicas)]
    split = [r for r in replicas if len(r.microbatches) > 1]
    text = " ".join(parts)
    # Replicas of one microbatch need no further words.
    if not split:
        return text
    if len({_sizes(r) for r in replicas}) == 1:
        return f"{text}, {_sizes(replicas[0])} each"
    parts = [f"{_sizes(r)} on {_place(r)}" for r in split[:_FEW]]
    return f"{text}, {_listed(parts)}" + (", …" if len(split) > _FEW else "")


def _tensor_parallel(parallel: Parallel) -> str:
    """Describe tensor-parallel groups of devices, alone or as stages of pipelines."""
    replicas = parallel.replicas
    how = "tensor parallel"
    how += f" pipeline{_SCHEDULES[parallel.schedule]}" if parallel.is_staged else ""
    listed = _places(replicas, parallel.tensor)
    sizes = f", {_sizes(replicas[0])} each" if len(replicas[0].microbatches) > 1 else ""
    if len(replicas) == 1:
        return f"{how} over {listed}{sizes}"
    return f"DDP, {_samples(replicas)} samples, {how} over {listed}{sizes}"


def _one_replica(replica: Replica, schedule: str) -> str:
    sizes = f", {_sizes(replica)}" if len(replica.microbatches) > 1 else ""
    if len(replica.devices) == 1:
        return f"1 GPU ({replica.devices[0]}){sizes}"
    return f"pipeline{_SCHEDULES[schedule]} over {_place(replica)}{sizes}"


def _samples(replicas: Sequence[Replica]) -> str:
    numbers = [replica.num_samples for replica in replicas]
    if len(numbers) <= _FEW:
        return " + ".join(str(number) for number in numbers)
    runs = [(number, len(list(run))) for number, run in groupby(numbers)]
    return " + ".join(f"{count} x {number}" for number, count in runs)


def _places(replicas: Sequence[Replica], tensor: int = 1) -> str:
    places = [_place(replica, tensor) for replica in replicas]
    if len(places) <= _FEW:
        return _listed(places)
    return f"{places[0]}, {places[1]}, … {places[-1]}"


def _place(replica: Replica, tensor: int = 1) -> str:
    """Join the devices of a replica: ``a + b > c + d`` is two stages of two devices each."""
    stages = range(0, len(replica.devices), tensor)
    return " > ".join(" + ".join(replica.devices[i : i + tensor]) for i in stages)


def _sizes(replica: Replica) -> str:
    sizes = replica.microbatches
    if len(sizes) == 1:
        return "1 microbatch"
    if len(set(sizes)) == 1:
        return f"{len(sizes)} microbatches of {sizes[0]}"
    return f"{len(sizes)} microbatches of {min(sizes)} and {max(sizes)}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
