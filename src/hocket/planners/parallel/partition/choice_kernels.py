"""The choice of one way per layer of a stage, in compiled code."""

from __future__ import annotations

import numpy as np

from hocket.kernels import kernel
from hocket.planners.parallel.partition.choices import ChoiceState

_TINY = 1e-12
"""Differences that are taken for none, relatively."""
_ROUNDING = 1e-15
"""Relative error of one sum."""


@kernel
def _best_way(state: ChoiceState, layer: int, second_per_byte: float) -> int:
    """The way with least time plus priced memory; of equals the one with less memory."""
    best, best_s = 0, state.time_s[layer, 0] + second_per_byte * state.memory_bytes[layer, 0]
    for way in range(1, state.num_ways[layer]):
        value_s = state.time_s[layer, way] + second_per_byte * state.memory_bytes[layer, way]
        is_smaller = state.memory_bytes[layer, way] < state.memory_bytes[layer, best]
        if value_s < best_s or (value_s == best_s and is_smaller):
            best, best_s = way, value_s
    return best


@kernel
def _smallest_way(state: ChoiceState, layer: int) -> int:
    """The way with least memory; of equals the faster one."""
    best = 0
    for way in range(1, state.num_ways[layer]):
        more_bytes = state.memory_bytes[layer, way] - state.memory_bytes[layer, best]
        is_faster = state.time_s[layer, way] < state.time_s[layer, best]
        if more_bytes < 0 or (more_bytes == 0 and is_faster):
            best = way
    return best


@kernel
def _relax(
    state: ChoiceState, count: int, limit_bytes: int, fast_s: float, fast_bytes: int,
    small_s: float, small_bytes: int,
) -> float:  # fmt: skip
    """The price of memory at which the relaxation is tight: seconds per byte.

    Between a choice that is too large and one that fits, the line through both gives the price;
    the best choice at that price replaces one of them, until none lies below the line.
    """
    while True:
        price = (small_s - fast_s) / (fast_bytes - small_bytes)
        trial_s, trial_bytes = 0.0, 0
        for layer in range(count):
            way = _best_way(state, layer, price)
            state.trial[layer] = way
            trial_s += state.time_s[layer, way]
            trial_bytes += state.memory_bytes[layer, way]
        line_s = small_s + price * small_bytes
        if trial_s + price * trial_bytes >= line_s - _TINY * abs(line_s):
            return price
        if trial_bytes <= limit_bytes:
            small_s, small_bytes = trial_s, trial_bytes
            for layer in range(count):
                state.chosen[layer] = state.trial[layer]
        else:
            fast_s, fast_bytes = trial_s, trial_bytes


@kernel
def _fill_up(state: ChoiceState, count: int, limit_bytes: int) -> float:
    """Make single layers faster while there is memory; the time of all."""
    total_bytes = 0
    for layer in range(count):
        total_bytes += state.memory_bytes[layer, state.chosen[layer]]
    total_s = 0.0
    for layer in range(count):
        best = state.chosen[layer]
        free_bytes = limit_bytes - total_bytes + state.memory_bytes[layer, best]
        for way in range(state.num_ways[layer]):
            is_faster = state.time_s[layer, way] < state.time_s[layer, best]
            if is_faster and state.memory_bytes[layer, way] <= free_bytes:
                best = way
        total_bytes = limit_bytes - free_bytes + state.memory_bytes[layer, best]
        state.chosen[layer] = best
        total_s += state.time_s[layer, best]
    return total_s


@kernel
def _extend(state: ChoiceState, layer: int, limit_bytes: int, price: float, below_s: float) -> bool:
    """Partial choices with one layer more, by rising memory and falling time; False if too many."""
    start, stop = state.layer_start[layer], state.layer_start[layer + 1]
    last_s, fill = np.inf, stop
    for way in range(state.num_ways[layer]):
        state.head[way] = start
    while True:
        pick, pick_bytes, pick_s = -1, 0, 0.0
        for way in range(state.num_ways[layer]):
            at = state.head[way]
            if at == stop:
                continue
            new_bytes = state.pool[at, 0] + state.memory_bytes[layer, way]
            new_s = state.pool_s[at] + state.time_s[layer, way]
            if pick < 0 or new_bytes < pick_bytes or (new_bytes == pick_bytes and new_s < pick_s):
                pick, pick_bytes, pick_s = way, new_bytes, new_s
        if pick < 0 or pick_bytes + state.least_bytes[layer + 1] > limit_bytes:
            break
        parent = state.head[pick]
        state.head[pick] += 1
        bound_s = pick_s + price * (pick_bytes - limit_bytes) + state.relaxed_s[layer + 1]
        if pick_s >= last_s or bound_s >= below_s:
            continue
        if fill == len(state.pool_s):
            return False
        state.pool_s[fill], state.pool[fill, 0] = pick_s, pick_bytes
        state.pool[fill, 1], state.pool[fill, 2] = parent, pick
        last_s = pick_s
        fill += 1
    state.layer_start[layer + 2] = fill
    return True


@kernel
def _search(state: ChoiceState, count: int, limit_bytes: int, price: float, best_s: float) -> float:
    """The least time below ``best_s``, or ``best_s`` with the choice that was there."""
    state.relaxed_s[count], state.least_bytes[count] = 0.0, 0
    for layer in range(count - 1, -1, -1):
        way, small = _best_way(state, layer, price), _smallest_way(state, layer)
        relaxed_s = state.time_s[layer, way] + price * state.memory_bytes[layer, way]
        state.relaxed_s[layer] = state.relaxed_s[layer + 1] + relaxed_s
        state.least_bytes[layer] = state.least_bytes[layer + 1] + state.memory_bytes[layer, small]
    # Bounds are sums of priced bytes, and their rounding errors must not drop the best.
    below_s = best_s * (1.0 - _TINY) + _ROUNDING * count * price * limit_bytes
    state.pool_s[0], state.pool[0, 0] = 0.0, 0
    state.layer_start[0], state.layer_start[1] = 0, 1
    for layer in range(count):
        if not _extend(state, layer, limit_bytes, price, below_s):
            state.num_inexact[0] += 1
            return best_s
        if state.layer_start[layer + 2] == state.layer_start[layer + 1]:
            return best_s
    # Time falls along the list, so that the last one is the fastest.
    at = state.layer_start[count + 1] - 1
    found_s = float(state.pool_s[at])
    if found_s >= best_s:
        return best_s
    for layer in range(count - 1, -1, -1):
        state.chosen[layer] = state.pool[at, 2]
        at = state.pool[at, 1]
    return found_s


@kernel
def least_time(state: ChoiceState, count: int, limit_bytes: int, enough_s: float) -> float:
    """The least time of the first ``count`` layers within the limit; infinite where nothing fits.

    A time of ``enough_s`` or less is taken as it comes; one above only says that none is as short.
    """
    fast_s, fast_bytes, small_s, small_bytes = 0.0, 0, 0.0, 0
    for layer in range(count):
        fast, small = _best_way(state, layer, 0.0), _smallest_way(state, layer)
        state.chosen[layer] = fast
        fast_s += state.time_s[layer, fast]
        fast_bytes += state.memory_bytes[layer, fast]
        small_s += state.time_s[layer, small]
        small_bytes += state.memory_bytes[layer, small]
    if fast_bytes <= limit_bytes or fast_s > enough_s >= 0.0:
        return fast_s
    if small_bytes > limit_bytes:
        return np.inf
    for layer in range(count):
        state.chosen[layer] = _smallest_way(state, layer)
    price = _relax(state, count, limit_bytes, fast_s, fast_bytes, small_s, small_bytes)
    bound_s = -price * limit_bytes
    for layer in range(count):
        way = _best_way(state, layer, price)
        bound_s += state.time_s[layer, way] + price * state.memory_bytes[layer, way]
    bound_s -= _TINY * (abs(bound_s) + price * limit_bytes)
    if bound_s > enough_s >= 0.0:
        return bound_s
    best_s = _fill_up(state, count, limit_bytes)
    if best_s <= enough_s:
        return best_s
    if enough_s >= 0.0:
        found_s = _search(state, count, limit_bytes, price, enough_s * (1.0 + 2.0 * _TINY))
        return found_s if found_s <= enough_s else best_s
    return _search(state, count, limit_bytes, price, best_s)


@kernel
def choose(state: ChoiceState, count: int, limit_bytes: int) -> float:
    """The least time of the first ``count`` layers; their ways are in ``state.chosen``."""
    return least_time(state, count, limit_bytes, -1.0)
