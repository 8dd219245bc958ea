"""Correct predictions by similar measured runs, for what the formulas do not explain.

Kriging (Matheron 1963; around the formulas of a model: Kennedy and O'Hagan 2001): the ratio of
measured and predicted time of a run applies to configs near it, less so the more doublings of sizes
and degrees lie between. Far from all measured runs the factor is 1. O(runs) per config, in pieces
that fit into caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray
from hocket.cost.parallel.coefficients import Anchor
from hocket.cost.parallel.measured_runs import MeasuredRun
from hocket.cost.parallel.software import Software
from hocket.transformer import ParallelConfigs, Transformer

UNEXPLAINED = 0.10
"""Standard deviation of the logarithm of measured over predicted time that the formulas leave: 0.03
to 0.12 in the published tables, twice that for mixtures of experts."""
REACH = 4.0
"""Doublings, summed over sizes and degrees, after which the correlation of two runs is 1/e. Values
of 2 to 8 hardly change the errors of runs that are left out of the fit."""
OTHER_PROGRAM = 4.0
"""Doublings that a difference in the training program is equivalent to."""
_PIECE = 4096


def places(model: Transformer, software: Software, configs: ParallelConfigs) -> FloatArray:
    """[config, coordinate]: log2 of sizes and degrees, then settings, of configs of one model."""
    count = configs.global_batch // (configs.microbatch * configs.data)
    sizes = (model.hidden, model.layers, model.heads, model.sequence)
    degrees = (
        configs.tensor, configs.pipeline, configs.data, configs.context, configs.expert,
        configs.microbatch, np.maximum(count, 1), configs.chunks,
    )  # fmt: skip
    settings = (configs.recompute, configs.zero, int(software.dtype == "float8"))
    columns = [np.log2(value) for value in (*sizes, *degrees)]
    columns += [np.asarray(value, dtype=np.float64) for value in settings]
    # The last array only broadcasts the others to one entry per config.
    found = np.stack(np.broadcast_arrays(*columns, configs.zero)[:-1], axis=1)
    return np.asarray(found, dtype=np.float64)


def similarity_of_runs(runs: Sequence[MeasuredRun]) -> tuple[FloatArray, FloatArray]:
    """[run, coordinate]: place of each run, and [run, run]: correlation of unexplained errors."""
    found = np.concatenate(
        [places(run.model, run.software, ParallelConfigs.of([run.config])) for run in runs]
    )
    programs = np.array([run.software.name for run in runs])
    return found, similarity(found, found, programs[:, None] == programs)


def at_depth(anchor: Anchor, num_layers: int) -> Anchor:
    """Copy an anchor to another number of layers, which is the second coordinate of its place."""
    hidden, _, *others = anchor.place
    return replace(anchor, place=(hidden, float(np.log2(num_layers)), *others))


def similarity(
    one: FloatArray, other: FloatArray, is_same_program: BoolArray | bool = True
) -> FloatArray:
    """[run, other run]: correlation of the unexplained errors of two runs, between 0 and 1."""
    doublings = np.zeros((len(one), len(other)))
    # Coordinate by coordinate, which takes less than half the time of all differences at once.
    for here, there in zip(one.T, other.T, strict=True):
        doublings += np.abs(here[:, None] - there)
    doublings += np.where(is_same_program, 0.0, OTHER_PROGRAM)
    return np.asarray(np.exp(-doublings / REACH))


def factors(
    anchors: Sequence[Anchor], model: Transformer, software: Software, configs: ParallelConfigs
) -> FloatArray:
    """Factor on each config's predicted step time from measured runs; 1 far from all of them."""
    found = np.ones(len(configs))
    if not anchors:
        return found
    measured = np.array([anchor.place for anchor in anchors])
    is_same = np.array([anchor.program == software.name for anchor in anchors])
    weights = np.array([anchor.weight for anchor in anchors])
    for start in range(0, len(configs), _PIECE):
        piece = slice(start, start + _PIECE)
        part = configs.take(np.arange(*piece.indices(len(configs))))
        shared = similarity(places(model, software, part), measured, is_same)
        found[piece] = np.exp(shared @ weights)
    return found
