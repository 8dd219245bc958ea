"""The lists of instructions: complete, free of deadlocks, and dropping nothing too early."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate.problems import joined, plans, problem_of, problems

from hocket.base.errors import CheckError
from hocket.graph import GraphBuilder, Role
from hocket.plan.plan import Plan
from hocket.runtime.device_instructions import Do, split
from hocket.simulate import simulate
from hocket.simulate.engine import instructions_of, lower


@st.composite
def cases(draw):
    problem = draw(problems(max_ops=14, max_devices=4, has_streams=True))
    plan = draw(plans(problem))
    timeline = simulate(problem, plan) if draw(st.booleans()) or plan.by_device is None else None
    tables = instructions_of(problem, plan)
    made = split(problem.graph, tables, timeline=timeline, order=plan.by_device)
    return problem, plan, timeline, made


class Machine:
    """Runs the lists in a random interleaving; a device can only stand still at a WAIT."""

    def __init__(self, graph, device_of, made):
        self.graph, self.device_of, self.made = graph, device_of, made
        self.lists = [made.of_device(device) for device in range(made.num_devices)]
        self.at = [0] * made.num_devices
        self.there = [set(present) for present in made.present]
        self.sent, self.posted, self.ran = set(), set(), []

    def can_go(self, device):
        if self.at[device] == len(self.lists[device]):
            return False
        do, number = self.lists[device][self.at[device]]
        return do != Do.WAIT or (number in self.sent and number in self.posted)

    def go(self, device):
        do, number = self.lists[device][self.at[device]]
        self.at[device] += 1
        there = self.there[device]
        if do == Do.RUN:
            assert self.device_of[number] == device
            assert set(self.graph.reads_of(number).tolist()) <= there
            there.update(self.graph.made_by(number))
            self.ran.append(number)
        elif do == Do.SEND:
            transfer = self.made.transfers[number]
            assert transfer.src == device
            assert transfer.tensor in there
            self.sent.add(number)
        elif do == Do.POST:
            assert self.made.transfers[number].dst == device
            self.posted.add(number)
        elif do == Do.WAIT:
            there.add(self.made.transfers[number].tensor)
        else:
            there.remove(number)

    def run(self, draw):
        while able := [d for d in range(self.made.num_devices) if self.can_go(d)]:
            self.go(draw.choice(able))
        assert self.at == [len(instructions) for instructions in self.lists], "deadlock"


@given(cases(), st.integers(0, 999))
@settings(derandomize=True, deadline=None, max_examples=150)
def test_every_interleaving_completes_with_every_read_there(case, seed):
    problem, plan, _, made = case
    machine = Machine(problem.graph, plan.device_of, made)
    machine.run(random.Random(seed))
    assert sorted(machine.ran) == list(range(problem.graph.num_ops))
    assert machine.sent == machine.posted == set(range(len(made.transfers)))


@given(cases())
@settings(derandomize=True, deadline=None, max_examples=50)
def test_only_what_is_kept_is_left_at_the_end(case):
    problem, plan, _, made = case
    graph = problem.graph
    machine = Machine(graph, plan.device_of, made)
    machine.run(random.Random(0))
    home = {t: d for d, present in enumerate(made.present) for t in present}
    home |= {t: int(plan.device_of[graph.tensor_producer[t]]) for t in range(graph.num_tensors)
             if graph.tensor_producer[t] >= 0}  # fmt: skip
    for device, there in enumerate(machine.there):
        results = {t for t in range(graph.num_tensors) if home[t] == device
                   and graph.tensor_producer[t] >= 0
                   and graph.tensor_role[t] in (Role.GRADIENT, Role.OUTPUT)}  # fmt: skip
        assert there == set(made.present[device]) | results


@given(cases())
@settings(derandomize=True, deadline=None, max_examples=50)
def test_transfers_are_those_of_the_simulator_once_each(case):
    problem, plan, timeline, made = case
    timeline = timeline or simulate(problem, plan)
    columns = (timeline.transfer_tensor, timeline.transfer_src, timeline.transfer_dst)
    simulated = Counter(zip(*(column.tolist() for column in columns), strict=True))
    assert Counter(tuple(transfer) for transfer in made.transfers) == simulated


@given(cases())
@settings(derandomize=True, deadline=None, max_examples=50)
def test_both_sides_of_a_pair_have_the_same_sequence(case):
    *_, made = case
    for a in range(made.num_devices):
        for b in range(a):
            of_pair = [
                [n for do, n in made.of_device(device) if do in (Do.SEND, Do.POST)
                 and {made.transfers[n].src, made.transfers[n].dst} == {a, b}]
                for device in (a, b)
            ]  # fmt: skip
            assert of_pair[0] == of_pair[1]


@given(cases())
@settings(derandomize=True, deadline=None, max_examples=50)
def test_devices_run_their_ops_in_planned_or_simulated_order(case):
    _, plan, timeline, made = case
    for device in range(made.num_devices):
        ops = [number for do, number in made.of_device(device) if do == Do.RUN]
        if plan.by_device is not None:
            assert ops == plan.by_device[device].tolist()
        else:
            assert np.all(np.diff(timeline.op_start_s[ops]) >= 0)


def test_what_is_there_from_the_start_is_sent_before_the_first_op_runs():
    builder = GraphBuilder("shared weight")
    weight = builder.tensor("weight", 8, role=Role.PARAMETER)
    builder.op("here", reads=[weight])
    builder.op("there", reads=[weight])
    graph = builder.build()
    problem = problem_of(graph, joined(2), 1.0)
    plan = Plan().placing(np.array([0, 1], np.int32))
    tables, timeline = instructions_of(problem, plan), simulate(problem, plan)
    for made in (split(graph, tables, timeline=timeline), split(graph, tables)):
        assert [do for do, _ in made.of_device(0)][:2] == [Do.SEND, Do.RUN]


def test_an_order_against_the_dependencies_is_refused():
    builder = GraphBuilder("two")
    first = builder.op("first")
    made = builder.tensor("made", 8, producer=first)
    builder.op("second", reads=[made])
    order, graph = (np.array([1, 0]),), builder.build()
    with pytest.raises(CheckError, match="'first' would wait forever"):
        split(graph, lower(problem_of(graph, joined(1), 1.0), np.zeros(2, np.int32)), order=order)
