"""Limits that a plan must satisfy: ``fit 8GiB``, ``devices 2``, ``step 500ms``, ``cost $3``.

``fit`` limits the memory of each device, ``devices`` the number of devices that compute, ``step``
the step time, and ``cost`` the dollars per million samples. ``data 2``, ``pipeline 4`` and ``tensor
2`` fix the number of replicas, of stages per replica and of tensor-parallel
ranks. A candidate that violates a limit is rejected with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hocket.base.errors import UsageError, did_you_mean
from hocket.base.units import format_seconds, parse_bytes, parse_seconds
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel
from hocket.planners.candidates import Candidate
from hocket.planners.devices import workers
from hocket.planners.goal import dollars_per_million, num_devices
from hocket.simulate.parallel.tensor_parallel import degrees_of


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """Limits that a plan must keep; infinite or None if not set."""

    device_bytes: float = float("inf")
    num_devices: float = float("inf")
    step_s: float = float("inf")
    dollars_per_million: float = float("inf")
    num_replicas: int | None = None
    num_stages: int | None = None
    num_parts: int | None = None

    def allows(self, parallel: Parallel) -> bool:
        """True if the config has the requested numbers of replicas, stages and parts."""
        if self.num_replicas not in (None, len(parallel.replicas)):
            return False
        if self.num_parts not in (None, parallel.tensor):
            return False
        stages = {parallel.num_stages(replica) for replica in parallel.replicas}
        return self.num_stages is None or stages == {self.num_stages}

    def on(self, problem: Problem) -> Problem:
        """The problem with every device's memory capped at the memory limit."""
        if self.device_bytes == float("inf"):
            return problem
        most = int(self.device_bytes)
        devices = tuple(
            # The headroom comes off later, so it is added to a limit on what a plan may use.
            replace(d, memory_bytes=min(d.memory_bytes, most + d.kind.headroom_bytes))
            for d in problem.cluster.devices
        )
        return replace(problem, cluster=replace(problem.cluster, devices=devices))

    def broken_by(self, problem: Problem, candidate: Candidate) -> str:
        """Message on the first limit that a fitting candidate violates; empty if it keeps all."""
        # Candidates that do not fit already have a reason.
        step_s = candidate.step_s
        if step_s is None:
            return ""
        if step_s > self.step_s:
            return f"longer than {format_seconds(self.step_s)}"
        if num_devices(candidate) > self.num_devices:
            return f"more than {self.num_devices:.0f} devices"
        parallel = None if candidate.plan is None else candidate.plan.get(Parallel)
        if parallel is None and (self.num_replicas or self.num_stages or self.num_parts):
            return "it does not split the batch"
        if parallel is not None and not self.allows(parallel):
            return "it has other numbers of replicas, stages or tensor-parallel ranks"
        if self.dollars_per_million == float("inf"):
            return ""
        cost = dollars_per_million(problem, candidate)
        if cost is None:
            return "its price is not known"
        return "" if cost <= self.dollars_per_million else "it costs more than it may"

    def missed_by(self, problem: Problem, fitting: Sequence[Candidate]) -> str:
        """Message if no fitting candidate keeps all limits, with the nearest values."""
        quickest = min(fitting, key=lambda c: c.step_s or 0.0)
        message = [f"the shortest step that was found is {format_seconds(quickest.step_s or 0.0)}"]
        costs = [dollars_per_million(problem, candidate) for candidate in fitting]
        known = [cost for cost in costs if cost is not None]
        if known and self.dollars_per_million < float("inf"):
            message.append(f"the least cost is ${min(known):.2g} per million samples")
        near = f"of candidates that fit, {', '.join(message)}"
        return "; ".join(part for part in (self.missing_degrees(problem, fitting), near) if part)

    def missing_degrees(self, problem: Problem, fitting: Sequence[Candidate]) -> str:
        """Message if no candidate has the requested replicas, stages and parts; else empty."""
        requested = {
            "data": self.num_replicas,
            "pipeline": self.num_stages,
            "tensor": self.num_parts,
        }
        named = " x ".join(
            f"{name} {count}" for name, count in requested.items() if count is not None
        )
        plans = [candidate.plan for candidate in fitting if candidate.plan is not None]
        sections = [plan[Parallel] for plan in plans if plan.get(Parallel) is not None]
        # Plans on more devices than allowed do not show that the degrees are possible.
        few = [each for each in sections if len(each.devices) <= self.num_devices]
        if not named or any(self.allows(each) for each in few):
            return ""
        cause = self._too_much(problem) or self._wrong_tensor_degree(problem)
        return f"no plan has {named}: {cause or 'of those that were tried none fits'}"

    def _too_much(self, problem: Problem) -> str:
        """Message if the requested degrees need more devices or samples than exist; else empty."""
        num_replicas = self.num_replicas or 1
        wanted = num_replicas * (self.num_stages or 1) * (self.num_parts or 1)
        usable = min(len(workers(problem)), self.num_devices)
        if wanted > usable:
            return f"that takes {wanted} devices and {usable:.0f} may be used"
        batch = problem.graph.other_batch
        if batch is not None and num_replicas > batch.num_samples:
            return f"every replica takes a sample and the batch has {batch.num_samples}"
        return ""

    def _wrong_tensor_degree(self, problem: Problem) -> str:
        """Message if the model or cluster does not allow the tensor degree; else empty."""
        num_parts = self.num_parts or 1
        degrees = degrees_of(problem.graph)
        if num_parts == 1:
            return ""
        if not degrees:
            return "tensor parallelism cannot split the matrices of its layers"
        if num_parts not in degrees:
            counts = " or ".join(map(str, degrees))
            return f"heads and widths of its layers allow tensor {counts}"
        kinds = problem.costs.device_row[workers(problem)]
        sizes = problem.memory_bytes[workers(problem)]
        alike = Counter(zip(kinds.tolist(), sizes.tolist(), strict=True))
        if max(alike.values()) < num_parts:
            return f"there are no {num_parts} devices of one type and memory for a group"
        return ""


NO_CONSTRAINTS = Constraints()


def parse_constraints(texts: str | Sequence[str]) -> Constraints:
    """Parse one or several limits; raises `UsageError` for an invalid one."""
    found: dict[str, Any] = {}
    for text in (texts,) if isinstance(texts, str) else texts:
        word, _, value = text.strip().partition(" ")
        if word not in _WORDS:
            hint = did_you_mean(word[:100], _WORDS)
            raise UsageError(f"unknown limit {text[:100]!r}", hint=hint)
        name, read = _WORDS[word]
        try:
            found[name] = read(value.strip())
        except ValueError as error:
            raise UsageError(
                f"cannot read the limit {text[:100]!r}: {error}",
                hint="write it like 'fit 8GiB', 'devices 2', 'step 500ms' or 'cost $3'",
            ) from None
    return Constraints(**found)


def parse_dollars(text: str) -> float:
    """Parse ``$5``, ``5.50`` or ``$5/h`` into dollars; raises `ValueError`."""
    plain = text.strip().removesuffix("/h").removesuffix("/hour").removeprefix("$")
    amount = float(plain)
    if not 0 < amount < float("inf"):
        raise ValueError(f"{text[:50]!r} is no sum of money")
    return amount


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError("expected 1 or more")
    return count


_WORDS: dict[str, tuple[str, Callable[[str], float]]] = {
    "fit": ("device_bytes", parse_bytes),
    "devices": ("num_devices", _count),
    "step": ("step_s", parse_seconds),
    "cost": ("dollars_per_million", parse_dollars),
    "data": ("num_replicas", _count),
    "pipeline": ("num_stages", _count),
    "tensor": ("num_parts", _count),
}
"""By limit: the field of `Constraints` that it sets, and the parser of its value."""
