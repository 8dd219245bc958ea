"""Recompute of chains: equal to every schedule tried, replayed by an interpreter of its own."""

import time
from dataclasses import replace

import numpy as np
import pytest

from hocket.planners.memory.chain import Chain, schedule_chain


def random_chain(seed, count, is_lean=False):
    rng = np.random.default_rng(seed)
    output = rng.integers(1, 6, count)
    chain = Chain(
        forward_s=rng.integers(1, 9, count).astype(float),
        backward_s=rng.integers(1, 9, count).astype(float),
        output_bytes=output,
        # Half of the stages need nothing but input and output.
        kept_bytes=output + rng.integers(0, 6, count) * rng.integers(0, 2, count),
        gradient_bytes=output,
        forward_work_bytes=rng.integers(0, 3, count),
        backward_work_bytes=rng.integers(0, 3, count),
    )
    if not is_lean:
        return chain
    kept = chain.kept_bytes + rng.integers(0, 5, count)
    left = np.maximum(kept - rng.integers(0, 5, (2, count)), chain.output_bytes)
    seconds = rng.integers(1, 5, (2, count)).astype(float)
    chain = replace(chain, kept_bytes=kept, lean_bytes=left, lean_s=seconds)
    alone = chain.back_bytes - rng.integers(0, 5, (1, count))
    return replace(chain, alone_s=chain.forward_s[None] / 2, alone_back_bytes=alone)


def replay(chain, actions):
    """Time and peak of a list of actions, and a failure where something is missing."""
    count = len(chain.forward_s)
    outputs, whole, lean, alone = {-1}, set(), {}, set()
    seconds, peak, gradient_at = 0.0, 0, count - 1
    order = []

    def held():
        """The gradient at hand, whole stages, and outputs that no whole stage holds already."""
        alone = [stage for stage in outputs if stage >= 0 and stage not in whole]
        return (
            int(chain.gradient_bytes[gradient_at])
            + sum(int(lean.get(s, chain.kept_bytes[s])) for s in whole)
            + sum(int(chain.output_bytes[s]) for s in alone)
        )

    for what, stage, *way in actions:
        if what == "free":
            assert stage in outputs - whole
            outputs.discard(stage)
            continue
        assert stage - 1 in outputs, "the input of a stage must be there"
        if what == "alone":
            seconds += chain.alone_s[0, stage]
            alone.add(stage)
            continue
        if what == "backward":
            assert stage == gradient_at
            assert stage in whole | alone or (
                chain.kept_bytes[stage] == chain.output_bytes[stage] and stage in outputs
            )
            before = int(chain.gradient_bytes[stage - 1]) if stage else 0
            # What was not kept is made again.
            lean.pop(stage, None)
            work = before + int(chain.backward_work_bytes[stage])
            if stage in alone:
                work = int(chain.alone_back_bytes[0, stage] - chain.gradient_bytes[stage])
            peak = max(peak, held() + work)
            seconds += chain.backward_s[stage]
            whole.discard(stage)
            outputs.discard(stage)
            gradient_at -= 1
            order.append(stage)
            continue
        seconds += chain.forward_s[stage]
        size = chain.kept_bytes[stage] if what in ("all", "lean") else chain.output_bytes[stage]
        peak = max(peak, held() + int(size) + int(chain.forward_work_bytes[stage]))
        outputs.add(stage)
        if what in ("all", "lean"):
            whole.add(stage)
        if what == "lean":
            lean[stage] = chain.lean_bytes[way[0], stage]
            seconds += chain.lean_s[way[0], stage]
        if what == "drop":
            outputs.discard(stage - 1)
    assert order == list(range(count))[::-1]
    return seconds, peak


def every_schedule(chain, first, last, has_output=False):
    """All schedules that keep what they store until its backward pass, or free it at once."""
    if first == last:
        if not has_output:
            yield [("all", first), ("backward", first)]
            if chain.alone_s is not None and last < len(chain.forward_s) - 1:
                yield [("alone", first), ("backward", first)]
        elif chain.kept_bytes[first] == chain.output_bytes[first]:
            yield [("backward", first)]
        return
    for inner in every_schedule(chain, first + 1, last, has_output):
        yield [("all", first), *inner, ("backward", first)]
        for way in range(0 if chain.lean_bytes is None else len(chain.lean_bytes)):
            yield [("lean", first, way), *inner, ("backward", first)]
    for at in range(first + 1, last + 1):
        run = [("checkpoint", first), *(("drop", stage) for stage in range(first + 1, at))]
        for right in every_schedule(chain, at, last, has_output):
            for left in every_schedule(chain, first, at - 1):
                yield [*run, *right, ("free", at - 1), *left]
            for left in every_schedule(chain, first, at - 1, True):
                yield [*run, *right, *left]


@pytest.mark.parametrize("seed", range(6))
def test_chain_is_equal_to_brute_force(seed):
    chain = random_chain(seed, 5)
    tried = [replay(chain, actions) for actions in every_schedule(chain, 0, 4)]
    for budget in range(1, int(chain.kept_bytes.sum()) + 20):
        best = min((seconds for seconds, peak in tried if peak <= budget), default=None)
        found = schedule_chain(chain, budget, num_slots=budget)
        assert (found is None) == (best is None)
        if found is not None:
            assert found.seconds == pytest.approx(best)
            seconds, peak = replay(chain, found.actions)
            assert seconds == pytest.approx(found.seconds)
            assert peak <= budget


@pytest.mark.parametrize("seed", range(3))
def test_chain_with_lean_ways_is_equal_to_brute_force(seed):
    chain = random_chain(seed, 4, is_lean=True)
    tried = [replay(chain, actions) for actions in every_schedule(chain, 0, 3)]
    for budget in range(1, int(chain.kept_bytes.sum()) + 20):
        best = min((seconds for seconds, peak in tried if peak <= budget), default=None)
        found = schedule_chain(chain, budget, num_slots=budget)
        assert (found is None) == (best is None)
        assert found is None or found.seconds == pytest.approx(best)


def test_chain_keeps_everything_where_there_is_room_and_rounds_upwards():
    chain = random_chain(3, 30)
    plenty = schedule_chain(chain, 10_000)
    assert plenty.seconds == pytest.approx(chain.forward_s.sum() + chain.backward_s.sum())
    times = []
    for budget in range(40, 400, 13):
        found = schedule_chain(chain, budget, num_slots=37)
        if found is not None:
            assert replay(chain, found.actions)[1] <= budget
            times.append(found.seconds)
    assert times


def test_hundred_layers_are_quick():
    chain = random_chain(1, 100)
    schedule_chain(chain, 120, num_slots=100)
    started = time.process_time()
    found = schedule_chain(chain, 250, num_slots=400)
    assert found is not None
    assert time.process_time() - started < 5
