"""Judging a loop with data and holding every option to the oracle and to plain Python."""

from __future__ import annotations

import copy

import numpy as np
from loops.oracle import check_private, check_tiling, random_order, trace

from hocket.loops import memory
from hocket.loops.choice import choose
from hocket.loops.form import Refusal
from hocket.loops.function import parallel_for
from hocket.loops.job import arguments_for, exchange, finish
from hocket.loops.runner import SiteRunner


class Looked:
    """What a loop was found to be, for one set of arguments."""

    def __init__(self, function, arguments, **options):
        self.parallel = parallel_for(**options)(function)
        self.arguments = arguments
        self.source = self.parallel.source
        self.decisions = {}

    def record(self):
        """Decide each loop when it is reached, but run everything in Python."""
        looked = self

        def run(number, variables):
            runner = looked.parallel.runners[number]
            try:
                values = runner.values(variables)
            except Refusal:
                return None
            if number not in looked.decisions:
                owners = memory.owners(values)
                looked.decisions[number] = (runner, runner.decide(values, owners), values, owners)
            return None

        self.parallel._run = run
        arguments = copy.deepcopy(self.arguments)
        self.parallel(*arguments)
        return self

    @property
    def kind(self):
        """The shape chosen for the first loop, or how else it runs."""
        decision = self.decisions[0][1]
        if decision.candidate is None:
            return decision.execution
        return decision.candidate.option.shape.kind


def check_sound(function, arguments, workers=(2, 3), ordered=False, permit=None):
    """Hold every legal option of every outer loop to the oracle; how many there were."""
    looked = Looked(function, arguments, ordered=ordered, permit=permit, workers=2).record()
    count = 0
    for site in looked.source.sites:
        if site.number not in looked.decisions:
            continue
        runner, decision, values, owners = looked.decisions[site.number]
        try:
            written = frozenset().union(*(r.body.written for r in decision.verdict.readings))
            memory.check_overlaps(values, written, 0)
        except Refusal:
            continue
        for option in decision.verdict.options:
            for num_workers in workers:
                candidate, _ = choose([option], values, num_workers, None)
                if candidate is None:
                    continue
                count += 1
                _check(looked, runner, candidate, function)
                if len(looked.source.sites) == 1 and not option.buffered:
                    _check_result(looked, runner, decision, candidate, function, owners)
    return looked, count


def _check(looked, runner, candidate, function):
    option = candidate.option
    arguments = copy.deepcopy(looked.arguments)
    log, order = trace(looked.source, option.reading.levels, arguments, function.__globals__)
    parameters = looked.source.parameters
    given = looked.arguments
    place = {
        name: f"array{next(k for k, other in enumerate(given) if other is given[number])}"
        for number, name in enumerate(parameters)
    }
    replicated = option.private | option.summed | option.buffered
    hidden = {place[name] for name in replicated if name in place}
    check_tiling(option, candidate.space, candidate.tiling, log, order, hidden)
    check_private({place[name] for name in option.private if name in place}, option, log)


def python_kernel(source):
    """The generated kernel, run by Python itself."""
    text = source.text.replace("from numba import njit", "njit = lambda **_: lambda f: f")
    space = {"OPTIONS_": {}}
    exec(text, space)
    return space["kernel"]


def _check_result(looked, runner, decision, candidate, function, owners):
    """Tiles in random orders give one result, which is the loop's own where that is claimed."""
    expected = copy.deepcopy(looked.arguments)
    returned = function(*expected)
    outcomes = []
    for seed in (None, 1, 2):
        arguments = copy.deepcopy(looked.arguments)
        result = _run_tiles(looked, runner, decision, candidate, arguments, seed, function)
        outcomes.append((arguments, result))
    for arguments, result in outcomes[1:]:
        _assert_same(arguments, outcomes[0][0])
        assert result == outcomes[0][1]
    if candidate.option.shape.keeps_order:
        _assert_same(outcomes[0][0], expected)
        if returned is not None and not isinstance(returned, np.ndarray):
            assert np.all(np.asarray(outcomes[0][1]) == np.asarray(returned)), (
                candidate.option.shape,
                outcomes[0][1],
                returned,
            )


def _run_tiles(looked, runner, decision, candidate, arguments, seed, function):
    parallel = looked.parallel
    chosen = runner.decider.parallel(decision.verdict, candidate, [])
    kernel = python_kernel(chosen.source)
    fresh = SiteRunner(looked.source, runner.site, runner.settings)

    def run(number, variables):
        if number != runner.site.number:
            return None
        values = fresh.values(variables)
        owners = memory.owners(values)
        job = fresh.job(chosen, values, owners)
        tiling = job.tiling
        numbers = range(len(tiling.tiles)) if seed is None else random_order(tiling, seed)
        replicas = [
            {name: job.replica(name) for name in job.replicated} for _ in range(tiling.num_workers)
        ]
        results = [()] * len(tiling.tiles)
        for number in numbers:
            tile = tiling.tiles[number]
            results[number] = kernel(*job.leading(tile), *arguments_for(job, replicas[tile.worker]))
        exchange(job, replicas)
        finish(job, replicas)
        return fresh._combined(chosen, values, results)

    parallel._run = run
    return parallel(*arguments)


def _assert_same(one, other):
    for left, right in zip(one, other, strict=True):
        if isinstance(left, np.ndarray):
            np.testing.assert_array_equal(left, right)
