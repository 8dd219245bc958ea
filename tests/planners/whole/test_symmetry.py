"""Equal replicas: one that stands for all has the step and peaks of all simulated one by one."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from planners.whole.whole_nets import Text, problem_on

from hocket.capture.sizes import capture_sizes
from hocket.plan.make import make_problem
from hocket.plan.sections import Parallel, Replica
from hocket.planners.parallel.closed_form import block_edges, tables_of
from hocket.planners.parallel.sharded import equal_shards
from hocket.planners.parallel.simulated import Budget
from hocket.simulate import symmetry
from hocket.simulate.engine import simulate_parallel
from hocket.simulate.parallel.tensor_parallel import degrees_of, regions_of


def sections(problem):
    """Degrees over 8 devices; replicas of pipelines have their stages side by side or apart."""
    cut, names = int(tables_of(problem).cuts[12]), problem.cluster.device_names
    names = names[:: len(names) // 8]
    num_samples = problem.graph.other_batch.num_samples

    def spread(data, stages, tensor, is_across=False, **options):
        size = num_samples // data
        replicas = tuple(
            Replica(
                devices=tuple(
                    names[(s * data + i if is_across else i * stages + s) * tensor + t]
                    for s in range(stages) for t in range(tensor)
                ),
                microbatches=(size // 2, size - size // 2) if size > 1 else (size,),
                cuts=(cut,) * (stages - 1),
            )
            for i in range(data)
        )  # fmt: skip
        return Parallel(replicas=replicas, tensor=tensor, **options)

    yield "DDP", spread(4, 1, 1)
    yield "FSDP", spread(4, 1, 1, zero=3)
    yield "tensor", spread(2, 1, 4)
    yield "pipeline", spread(4, 2, 1)
    yield "pipeline across", spread(4, 2, 1, is_across=True)
    yield "all", spread(2, 2, 2, schedule="gpipe")
    ddp = spread(4, 1, 1)
    blocks = tuple(pairwise(block_edges(problem.graph)))
    yield (
        "recomputed",
        replace(ddp, replicas=tuple(replace(r, recomputed=blocks[:2]) for r in ddp.replicas)),
    )
    yield (
        "on the host",
        replace(ddp, replicas=tuple(replace(r, update="host") for r in ddp.replicas)),
    )


@pytest.mark.parametrize(
    ("on", "limit"), [("8xa100-80g", "MAX_OPS"), ("2xdgx-a100-80g", "MAX_DEVICES")]
)
def test_one_replica_stands_for_all(text, on, limit, monkeypatch):
    problem = problem_on(text, on)
    for name, section in sections(problem):
        _, all_of_them = simulate_parallel(problem, section)
        with monkeypatch.context() as patch:
            patch.setattr(symmetry, limit, 0)
            expanded, one = simulate_parallel(problem, section)
        assert expanded.stands_for is not None, name
        # One by one, ranks also send each other signals, which take long in so short a step.
        assert one.makespan_s == pytest.approx(all_of_them.makespan_s, rel=0.06), name
        assert np.allclose(one.peak_bytes, all_of_them.peak_bytes, rtol=1e-6), name
        assert len(np.unique(expanded.device_of)) == section.num_stages(section.replicas[0]), name


def test_tensor_parallelism_is_found_under_autocast(text):
    with torch.autocast("cpu", torch.bfloat16):
        cast = capture_sizes(Text(), torch.zeros(4, 256, dtype=torch.long))
    assert cast.num_ops > text.num_ops
    plain, low = regions_of(text), regions_of(cast)
    assert degrees_of(cast) == degrees_of(text) == (2, 4, 8)
    assert len(low.sums) == len(plain.sums)
    assert cast.flops[low.is_divided].sum() == pytest.approx(
        text.flops[plain.is_divided].sum(), rel=0.02
    )


def test_unequal_replicas_are_all_simulated(text, monkeypatch):
    monkeypatch.setattr(symmetry, "MAX_DEVICES", 0)
    problem = problem_on(text, "2xa100-80g+2xv100-16g")
    names = problem.cluster.device_names
    mixed = Parallel(replicas=tuple(Replica(devices=(n,), microbatches=(3,)) for n in names))
    assert not symmetry.is_symmetric(problem, mixed)
    equal = Parallel(replicas=mixed.replicas[:2])
    assert symmetry.is_symmetric(problem, equal)
    other = replace(equal.replicas[1], microbatches=(2, 1))
    assert not symmetry.is_symmetric(problem, Parallel(replicas=(equal.replicas[0], other)))


def test_shards_that_cannot_fit_are_not_simulated(graph):
    free = problem_on(graph, "2xv100-16g")
    names, peaks = free.cluster.device_names, {}
    for count in (1, 2, 3):
        replicas = tuple(Replica(devices=(n,), microbatches=(6 // count,) * count) for n in names)
        _, timeline = simulate_parallel(free, Parallel(replicas=replicas, zero=3))
        peaks[count] = int(timeline.peak_bytes.max())
    headroom = int(free.memory_bytes[0]) - peaks[3]
    tight = make_problem(graph, "2xv100-16g", headroom_bytes=headroom)
    budget = Budget(tight)
    found = equal_shards(tables_of(tight), [0, 1], budget)
    assert found.feasible
    assert len(found.plan[Parallel].replicas[0].microbatches) == 3
    assert len(budget.seen) < 3
