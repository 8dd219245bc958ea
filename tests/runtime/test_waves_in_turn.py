"""Waves whose partitions take turns on several devices."""

from dataclasses import replace

import pytest
import torch
from runtime.waved_models import fitted

from hocket.base.errors import CheckError, UsageError
from hocket.plan.make import make_problem
from hocket.planners.waves.round_robin import fit_partitions
from hocket.runtime.offload.copy_streams import CopyStreams
from hocket.runtime.strategies.round_robin import PartitionPrefetch, round_robin_slots
from hocket.simulate.verify import verify


@pytest.mark.parametrize("count", [2, 4, 5])
def test_partitions_in_turn_keep_every_rank_busy_with_another_wave(count):
    ranks = [round_robin_slots(count, rank) for rank in range(count)]
    for at, slots in enumerate(zip(*ranks, strict=True)):
        (stage,) = {stage for stage, _, _ in slots}
        assert stage == (at if at < count else 2 * count - 1 - at)
        assert sorted(wave for _, wave, _ in slots) == list(range(count))
    for rank, slots in enumerate(ranks):
        assert all((wave + stage) % count == rank for stage, wave, _ in slots)
        forward, back = slots[:count], slots[count:]
        # What a wave made is here when its backward pass comes.
        assert {(s, w) for s, w, _ in forward} == {(s, w) for s, w, _ in back}


def test_two_partitions_at_a_time_are_where_they_are_computed_with():
    home = {name: torch.full((3,), float(number)) for number, name in enumerate("abc")}
    partitions = PartitionPrefetch(CopyStreams(torch.device("cpu"), is_real=False), home)
    for stage in (0, 1):
        partitions.fetch(stage, [*home][stage : stage + 1])
    assert partitions.use(1)["b"].tolist() == [1.0] * 3
    assert partitions.use(1)["b"] is not home["b"]
    partitions.leave(0)
    with pytest.raises(KeyError):
        partitions.use(0)
    partitions.fetch(2, ["c"])
    home["b"].add_(1)
    partitions.leave(1)
    partitions.fetch(1, ["b"])
    assert partitions.use(1)["b"].tolist() == [2.0] * 3


def test_waves_in_turn_are_a_legal_plan_that_says_what_it_gains():
    alone = fitted(depth=3)[2].problem
    graph = alone.graph
    fit = fit_partitions(make_problem(graph, "2xv100-16g"))
    verify(fit.plan(), fit.problem)
    assert fit.turns.parallel.is_round_robin
    assert fit.gain == fit.candidates[-1].samples_per_s / max(
        w.samples_per_s for w in fit.candidates[:-1]
    )
    # Partitions are fetched behind slots; what takes longer is waited for in each of them.
    slow, quick = (replace(fit.turns, fetch_s=s, slot_s=0.25) for s in (1.0, 0.125))
    makespan_s = fit.turns.timeline.makespan_s
    assert slow.step_s == pytest.approx(1.04 * makespan_s + slow.num_slots * 0.75)
    assert quick.step_s == pytest.approx(1.04 * makespan_s)
    wrong = replace(fit.turns.parallel, replicas=(fit.turns.parallel.replicas[0],) * 2)
    assert not wrong.is_round_robin
    with pytest.raises(CheckError, match="two stages"):
        verify(fit.plan().having(wrong), fit.problem)
    with pytest.raises(UsageError, match="two devices or more"):
        fit_partitions(alone)
    with pytest.raises(UsageError, match="3 equal waves"):
        fit_partitions(make_problem(graph, "3xv100-16g"))
