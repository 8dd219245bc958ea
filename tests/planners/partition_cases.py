"""Small models to divide, and every way to divide them."""

from itertools import combinations, pairwise, permutations

import numpy as np
from hypothesis import strategies as st

from hocket.planners.parallel.layer_partition import LayerCosts


@st.composite
def layer_costs(draw, max_layers=7, max_kinds=2):
    """Layers with small whole costs, so that sums are exact and ties are frequent."""
    num_layers = draw(st.integers(1, max_layers))
    num_kinds = draw(st.integers(1, max_kinds))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    backward = rng.integers(0, 12, (num_layers, num_kinds)).astype(float)
    kept = rng.integers(0, 6, num_layers)
    if draw(st.booleans()):
        # Layers alike, as in a transformer.
        backward[:], kept[:] = backward[:1], kept[:1]
    counts = np.ones(num_layers, dtype=bool)
    if num_layers > 2 and draw(st.booleans()):
        counts[[0, -1]] = False
    return LayerCosts(
        forward_s=rng.integers(1, 9, (num_layers, num_kinds)).astype(float),
        backward_s=backward,
        activation_bytes=kept,
        state_bytes=rng.integers(0, 4, num_layers),
        send_s=rng.integers(0, 3, num_layers).astype(float),
        counts=counts,
    )


def pipeline_step(forward_s, stage_s, sent_s, in_flight, num_microbatches):
    """The step of a pipeline: the longest over stages k of the way before k, and k with its waits.

    ``sent_s`` are both transfers over each boundary.
    """
    steps = []
    for k in range(len(stage_s)):
        before = sum(stage_s[:k]) + sum(sent_s[:k])
        behind = sum(stage_s[k + 1 :]) + sum(sent_s[k:])
        forward, backward = forward_s[k], stage_s[k] - forward_s[k]
        count = min(in_flight[k], num_microbatches)
        waits = [max(0.0, behind - (count - 1) * work) for work in (forward, backward)]
        if count == num_microbatches:
            wait = max(waits)
        else:
            round_s = max(0.0, (behind + stage_s[k]) / count - stage_s[k])
            wait = sum(waits) + (num_microbatches - count - 1) * round_s
        steps.append(before + num_microbatches * stage_s[k] + wait)
    return max(steps)


def stage_time(costs, start, stop, kind, in_flight, limit):
    """The time of a stage; None if it does not fit."""
    held = in_flight * costs.activation_bytes[start:stop].sum()
    if held + costs.state_bytes[start:stop].sum() > limit:
        return None
    return costs.forward_s[start:stop, kind].sum() + costs.backward_s[start:stop, kind].sum()


def brute_force(costs, kinds, memory, in_flight, num_microbatches, reorder):
    """The least step over all cuts and orders; None if nothing fits."""
    best, known = None, {}
    orders = set(permutations(kinds)) if reorder else {tuple(kinds)}
    for inner in combinations(range(1, len(costs.state_bytes)), len(kinds) - 1):
        starts = (0, *inner, len(costs.state_bytes))
        spans = list(pairwise(starts))
        if not all(costs.counts[a:b].any() for a, b in spans):
            continue
        for order in orders:
            times = []
            for stage, (a, b) in enumerate(spans):
                key = (a, b, order[stage], in_flight[stage])
                if key not in known:
                    known[key] = stage_time(costs, *key, memory[order[stage]])
                times.append(known[key])
            if None in times:
                continue
            sent = 2 * costs.send_s[np.array(inner, dtype=int) - 1]
            placed = zip(spans, order, strict=True)
            forward = [costs.forward_s[a:b, kind].sum() for (a, b), kind in placed]
            step = pipeline_step(forward, times, sent, in_flight, num_microbatches)
            best = step if best is None else min(best, step)
    return best
