"""Calibrate the closed form of a transformer's shape with simulated steps of its captured ops.

A cluster of thousands of devices has too many links to simulate. So its first hosts are simulated,
with the same number of samples per device and a few layers of the model, and the closed form is
fitted to these steps as it is to measured runs (`hocket.cost.parallel.calibrate`). Thus predictions
for few and for many devices use the same kernel model. O(simulated candidates).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hocket.cost.parallel.calibrate import MIN_RUNS, calibrate
from hocket.cost.parallel.coefficients import SIMULATED
from hocket.cost.parallel.measured_runs import MeasuredRun
from hocket.cost.parallel.similarity import at_depth
from hocket.cost.parallel.software import Software
from hocket.hardware.cluster import Cluster
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel
from hocket.planners.candidates import Comparison, SimulatedCandidate
from hocket.planners.parallel.forecast import graph_config, has_degrees
from hocket.planners.parallel.pools import accelerators
from hocket.transformer import ParallelConfig, Transformer

MOST_SIMULATED = 64
"""Largest number of devices for which captured ops are simulated; above, the closed form."""
MOST_LAYERS = 8
"""Largest number of layers captured for the calibration; all layers have the same kernels."""
_MOST_IN_PART = 16
_NOISE = 0.01
"""Relative difference of two simulated steps that no coefficient explains: rounding of batches."""


def part_of(cluster: Cluster) -> Cluster:
    """The first hosts of the cluster with up to 16 devices together, but at least one host."""
    hosts: dict[str, list[str]] = {}
    for device in accelerators(cluster):
        hosts.setdefault(device.host, []).append(device.name)
    names: list[str] = []
    for devices in hosts.values():
        if names and len(names) + len(devices) > _MOST_IN_PART:
            break
        names += devices
    return replace(cluster.only(names), name=f"{len(names)} devices of {cluster.name}")


def part_batch(batch: int, cluster: Cluster, part: Cluster) -> int:
    """The part's proportion of a batch, but at least one sample per device."""
    return max(batch * part.num_devices // len(accelerators(cluster)), part.num_devices)


def calibrated(problem: Problem, simulated: Comparison, num_layers: int) -> Problem:
    """The problem with its closed form fitted to simulated candidates of its first layers."""
    training = problem.training
    runs = list(_runs(simulated, replace(training.model, layers=num_layers), training.software))
    if len(runs) < MIN_RUNS:
        return problem
    part = simulated.problem.cluster
    source = f"{SIMULATED} of {len(runs)} configs on {part.name}"
    fitted = calibrate(runs, part, source, noise=_NOISE)
    # Residuals are those of kernels, which are the same in every layer.
    anchors = tuple(at_depth(anchor, training.model.layers) for anchor in fitted.anchors)
    return replace(problem, work=replace(training, coefficients=replace(fitted, anchors=anchors)))


def _runs(simulated: Comparison, model: Transformer, software: Software) -> Iterator[MeasuredRun]:
    """Yield simulated candidates with equal replicas, whether they fit or not."""
    graph, seen = simulated.problem.graph, set[ParallelConfig]()
    for candidate in simulated.candidates:
        if not (isinstance(candidate, SimulatedCandidate) and has_degrees(candidate)):
            continue
        parallel = candidate.plan[Parallel]
        config = graph_config(graph, parallel)
        alike = {(r.microbatches, r.recomputed) for r in parallel.replicas}
        is_even = len(alike) == 1 and len(set(parallel.replicas[0].microbatches)) == 1
        is_on_device = all(replica.update == "device" for replica in parallel.replicas)
        if is_even and is_on_device and config.recompute != "selective" and config not in seen:
            seen.add(config)
            yield MeasuredRun(
                model=model, config=config, software=software,
                step_s=candidate.timeline.makespan_s,
            )  # fmt: skip
