"""Piper's recurrence as its paper writes it, slowly, and plainer things still.

`full_table` fills the whole table over (set of last layers, devices, sum of data degrees) with
numpy; `every_division` tries all divisions one by one; `check_plan` works out what a plan costs.
"""

from itertools import product
from math import ceil

import numpy as np


def cut_bytes(model, node, variant, inside):
    """What a node exchanges per microbatch with nodes of other stages and inside its own."""
    cut = 0.0
    for src in variant.sync_forward:
        if src not in inside:
            cut += 2 * (model.edges[src, node.id] + variant.sync_forward[src])
    for dst in variant.sync_backward:
        if dst not in inside:
            cut += 2 * (model.edges[node.id, dst] + variant.sync_backward[dst])
    return cut


def variant_time(model, variant, cut, data):
    """What a node adds to the time per microbatch of its stage."""
    sync = 4 * (data - 1) * variant.parameter_bytes / data / model.num_microbatches
    return (cut / data + sync) / model.bandwidth_bps + variant.time_s / data


def least_time(ways, limit):
    """The least sum of times with a sum of bytes within the limit, by lists of partial choices."""
    front = [(0.0, 0)]
    for options in ways:
        grown = sorted((b + size, t + time) for t, b in front for time, size in options)
        front, fastest = [], np.inf
        for size, time in grown:
            if size <= limit and time < fastest:
                front.append((time, size))
                fastest = time
    return front[-1][0] if front else np.inf


def greedy_time(ways, limit):
    """Piper's own choice: from the fastest, the cheapest saving first until it fits."""
    fastest = [min(options) for options in ways]
    excess = sum(size for _, size in fastest) - limit
    swaps = sorted(
        ((time - fast[0]) / (fast[1] - size), index, time - fast[0], fast[1] - size)
        for index, (options, fast) in enumerate(zip(ways, fastest, strict=True))
        for time, size in options
        if size < fast[1]
    )
    total = sum(time for time, _ in fastest)
    for _, _, more, saved in swaps:
        if excess <= 0:
            break
        total, excess = total + more, excess - saved
    return total if excess <= 0 else np.inf


def stage_variants(model, nodes, tensor):
    """All variants of the nodes of a stage with what they exchange; None if one has none."""
    inside = {node.id for node in nodes}
    if any(tensor not in node.variants for node in nodes):
        return None
    return [
        [(variant, cut_bytes(model, node, variant, inside)) for variant in node.variants[tensor]]
        for node in nodes
    ]


def stage_ways(model, variants, data, in_flight):
    """Time and bytes of all ways of all nodes of a stage."""
    return [
        [
            (
                variant_time(model, variant, cut, data),
                in_flight * ceil(variant.activation_bytes) + ceil(variant.fixed_bytes),
            )
            for variant, cut in options
        ]
        for options in variants
    ]


def last_sets(model):
    """Sets of node ids that contain with each node all that follow it, smallest first."""
    found = {frozenset()}
    waiting = [frozenset()]
    while waiting:
        members = waiting.pop()
        for node in model.nodes:
            followers = {dst for src, dst in model.edges if src == node.id}
            larger = members | {node.id}
            if followers <= members and larger not in found:
                found.add(larger)
                waiting.append(larger)
    return sorted(found, key=lambda members: (len(members), sorted(members)))


def full_table(model, num_devices, choose=least_time):
    """The least time per sample by the full table; infinite where nothing fits."""
    most = min(num_devices, model.num_microbatches)
    degrees = {degree for node in model.nodes for degree in node.variants}
    divisors = [d for d in range(1, num_devices + 1) if model.num_microbatches % d == 0]
    sets = last_sets(model)
    table = {sets[0]: np.zeros((num_devices + 1, most + 1))}
    for members in sets[1:]:
        best = np.full((num_devices + 1, most + 1), np.inf)
        for rest in (smaller for smaller in sets if smaller < members):
            nodes = [node for node in model.nodes if node.id in members - rest]
            known_variants = {tensor: stage_variants(model, nodes, tensor) for tensor in degrees}
            for tensor, data in product(degrees, divisors):
                used, variants = tensor * data, known_variants[tensor]
                if used > num_devices or data > most or variants is None:
                    continue
                times = np.full(most + 1, np.inf)
                known = {}
                for replicas in range(data, most + 1):
                    in_flight = -(-replicas // data)
                    if in_flight not in known:
                        ways = stage_ways(model, variants, data, in_flight)
                        known[in_flight] = choose(ways, int(model.memory_bytes))
                    times[replicas] = known[in_flight]
                before = table[rest][: num_devices + 1 - used, : most + 1 - data]
                times = np.maximum(before, times[data:])
                best[used:, data:] = np.minimum(best[used:, data:], times)
        table[members] = best
    return table[sets[-1]].min()


def every_division(model, num_devices):
    """The least time per sample over all chains of sets, degrees and ways."""
    most = min(num_devices, model.num_microbatches)
    divisors = [d for d in range(1, num_devices + 1) if model.num_microbatches % d == 0]
    degrees = sorted({degree for node in model.nodes for degree in node.variants})
    sets = last_sets(model)

    def extended(members, devices, replicas):
        """The least time of all stages before a set, given what follows it."""
        if len(members) == len(model.nodes):
            return 0.0
        best = np.inf
        for larger in sets:
            if not members < larger:
                continue
            nodes = [node for node in model.nodes if node.id in larger - members]
            for tensor, data in product(degrees, divisors):
                if devices + tensor * data > num_devices or replicas + data > most:
                    continue
                variants = stage_variants(model, nodes, tensor)
                if variants is None:
                    continue
                in_flight = -(-(replicas + data) // data)
                for chosen in product(*stage_ways(model, variants, data, in_flight)):
                    if sum(size for _, size in chosen) > model.memory_bytes:
                        continue
                    time = sum(time for time, _ in chosen)
                    if time < best:
                        later = extended(larger, devices + tensor * data, replicas + data)
                        best = min(best, max(time, later))
        return best

    return extended(frozenset(), 0, 0)


def check_plan(model, plan, num_devices):
    """That a plan is legal and fits; its time per sample."""
    by_id = {node.id: node for node in model.nodes}
    stage_of = {node: i for i, stage in enumerate(plan.stages) for node in stage.nodes}
    assert sorted(stage_of) == sorted(by_id)
    assert sum(len(stage.nodes) for stage in plan.stages) == len(by_id)
    assert all(stage_of[src] <= stage_of[dst] for src, dst in model.edges)
    assert sum(stage.tensor * stage.data for stage in plan.stages) == plan.num_devices
    assert plan.num_devices <= num_devices
    replicas = sum(stage.data for stage in plan.stages)
    assert replicas <= model.num_microbatches
    slowest = 0.0
    for stage in plan.stages:
        assert model.num_microbatches % stage.data == 0
        in_flight, time, held = -(-replicas // stage.data), 0.0, 0.0
        assert in_flight == stage.in_flight
        for node, name in zip(stage.nodes, stage.variants, strict=True):
            (variant,) = (v for v in by_id[node].variants[stage.tensor] if v.name == name)
            cut = cut_bytes(model, by_id[node], variant, set(stage.nodes))
            time += variant_time(model, variant, cut, stage.data)
            held += variant.activation_bytes * in_flight + variant.fixed_bytes
        assert held <= model.memory_bytes
        slowest = max(slowest, time)
        replicas -= stage.data
    return slowest
