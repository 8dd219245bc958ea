"""Weights of a problem for ParDNN: seconds per op and per edge, and units that move together.

If devices differ, the weight of an op is its mean time over the devices that may run it, and that
of a tensor its mean transfer time over all pairs of devices. A unit is a set of ops that must share
a device, or a single op. O(ops + reads log reads) in numpy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.graph.coarsen import bound_ops
from hocket.kernels import kernel
from hocket.kernels.containers import table
from hocket.plan.problem import Problem
from hocket.planners.devices import elsewhere, op_s_of_units, workers
from hocket.planners.shared import OpGroups, groups_of, longest_from_start, longest_to_end
from hocket.planners.tables import mean_transfer_s, net_of


class UnitWork(NamedTuple):
    """Ops in topological order, the edges between them, and their units."""

    op_s: FloatArray
    child_ptr: LongArray
    child: LongArray
    """Ops that read from op i: ``child[child_ptr[i]:child_ptr[i + 1]]``, ascending."""
    child_s: FloatArray
    """Per entry of ``child``: mean seconds to send all tensors that the child reads from the op."""
    parent_ptr: LongArray
    parent: LongArray
    units: OpGroups
    tensor_s: FloatArray
    """Per tensor: mean seconds of a transfer."""


class Devices(NamedTuple):
    """Op times per device, with the devices that may run each op."""

    op_s: FloatArray
    """[device, op]: seconds; infinite if the op may not run there."""
    speed: FloatArray
    """Per device: mean time of its runnable ops over all devices, divided by their time here.

    0 for devices that only run ops that no accelerator can.
    """


def devices_of(problem: Problem, unit: IntArray) -> Devices:
    """Op times on workers, and on other devices for units that no worker can run."""
    forced = elsewhere(problem, unit)[unit]
    op_s = op_s_of_units(problem, unit)[problem.costs.device_row]
    chosen = workers(problem)
    is_worker = np.zeros(len(op_s), dtype=np.bool_)
    is_worker[chosen] = True
    if not is_worker.all() or (forced >= 0).any():
        device = np.arange(len(op_s))[:, None]
        op_s[np.where(forced >= 0, forced != device, ~is_worker[:, None])] = np.inf
    mean_s = mean_op_s(op_s)
    runs = np.isfinite(op_s)
    own_s = np.where(runs, op_s, 0.0).sum(axis=1)
    share_s = np.where(runs, mean_s, 0.0).sum(axis=1)
    speed = np.where(own_s > 0, share_s / np.where(own_s > 0, own_s, 1.0), 1.0)
    # Speed 0 keeps paths off devices that only run ops no accelerator can run.
    speed = np.where(is_worker, speed, 0.0)
    return Devices(table(op_s, np.float64), table(speed, np.float64))


def work_of(problem: Problem, unit: IntArray, devices: Devices) -> UnitWork:
    """Collect the weights of a problem."""
    edges = net_of(problem)
    return UnitWork(
        op_s=table(mean_op_s(devices.op_s), np.float64),
        child_ptr=edges.out_ptr,
        child=table(edges.dst[edges.out_edge], np.int64),
        child_s=table(edges.cost_s[edges.out_edge], np.float64),
        parent_ptr=edges.in_ptr,
        parent=table(edges.src, np.int64),
        units=groups_of(unit),
        tensor_s=table(mean_transfer_s(problem), np.float64),
    )


def units(problem: Problem) -> IntArray:
    """Per op: its unit, numbered from 0."""
    return bound_ops(problem.graph)


def mean_op_s(op_s: FloatArray) -> FloatArray:
    """Per op: seconds averaged over the devices that can run it."""
    runs = np.isfinite(op_s)
    total: FloatArray = np.where(runs, op_s, 0.0).sum(axis=0) / np.maximum(runs.sum(axis=0), 1)
    return total


# Longest paths through the ops: top levels, bottom levels and reverse depths.
#
# A top level is the length of the longest path that ends where an op begins, a bottom level the
# length of the longest path that begins with the op. Edges between ops with the same ``place`` (a
# path or a device; -1 for none) cost nothing. O(ops + edges).


def top_levels(work: UnitWork, place: LongArray) -> FloatArray:
    """Per op: its top level."""
    top_s = np.zeros(len(work.op_s))
    longest_from_start(work.child_ptr, work.child, _sent_s(work, place), work.op_s, top_s)
    return top_s


def bottom_levels(work: UnitWork, place: LongArray) -> FloatArray:
    """Per op: its bottom level."""
    bottom_s = np.zeros(len(work.op_s))
    longest_to_end(work.child_ptr, work.child, _sent_s(work, place), work.op_s, bottom_s)
    return bottom_s


def _sent_s(work: UnitWork, place: LongArray) -> FloatArray:
    src = np.repeat(place, np.diff(work.child_ptr))
    return np.where((src < 0) | (src != place[work.child]), work.child_s, 0.0)


@kernel
def reverse_depths(work: UnitWork, depth: LongArray) -> None:
    """Fill ``depth`` with the maximum number of edges from each op to an op without children."""
    for op in range(len(depth) - 1, -1, -1):
        deepest = -1
        for edge in range(work.child_ptr[op], work.child_ptr[op + 1]):
            deepest = max(deepest, depth[work.child[edge]])
        depth[op] = deepest + 1
