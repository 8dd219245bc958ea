"""Costs of a graph on a cluster: roofline first, then measured times, then times stated by a file.

Each later source replaces the earlier one op by op, and every number records its source. Ops that a
profile lacks get the roofline fitted to that profile. O(device types · ops), numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import NDArray

from hocket.base import fields
from hocket.base.arrays import BoolArray, FloatArray, IntArray
from hocket.base.errors import InputFileError, UsageError
from hocket.cost.calibrate import (
    Calibration,
    calibrate,
    calibration_from_dict,
    calibration_to_dict,
)
from hocket.cost.costs import Costs, TimeSource, device_rows, stated_op_s
from hocket.cost.efficiency import KindFit, roofline_s, work_of
from hocket.cost.families import FAMILIES, MATRIX_FAMILIES
from hocket.cost.host import (
    EAGER,
    REPLAYED,
    HostOverhead,
    issue_s,
    measured_host,
    with_host_overhead,
)
from hocket.cost.profile import Profile, profile_from_dict, profile_to_dict, require_times
from hocket.graph.graph import Graph, Phase
from hocket.graph.signatures import tensor_shapes
from hocket.hardware.cluster import Cluster, DeviceKind

# Recurrent layers as cuDNN runs them, in graphs that have them word by word.
#
# Appleyard, Kocisky and Blunsom 2016 ("Optimizing Performance of Recurrent Neural Networks on
# GPUs"): products with the inputs of all words are one, gradients of weights are summed in one, and
# what is left per word and layer is one product with the state and one kernel for all gates, which
# the library launches itself. A graph that was captured without a device has ten to thirty ops per
# word instead. So its products keep the time of their arithmetic, each word takes the host what
# cuDNN takes to launch one, and the ops between them nothing. O(ops), numpy.

WORD_HOST_S = (24e-6, 17e-6)
"""Host time per matrix product of a time step in cuDNN's recurrent layers, forward and backward;
the backward pass has two products.

An H200 with its host (``benchmarks/cost/predict_small.py``): LSTM and GRU of 256 to 2048 units,
batches of 16 to 512, one to four layers, both directions and both dtypes take 18 to 31 us per time
step forward and 19 to 47 backward, whatever their size, because the host is slower; at 2048 units
in float32 the device takes 50 and 72. Up to 128 units one kernel stays resident for all time steps
(3 and 9 us), which is not modelled.
"""
WORD_KERNELS = 2
"""Kernels per time step on the device: the product and the gates."""
_WHOLE_LAYER, _WHOLE_NET = "aten.mkldnn_rnn_layer", "aten._cudnn_rnn"
"""Fused ops: one layer on a CPU, all layers and directions on a GPU."""
_PRODUCTS = [FAMILIES.index(name) for name in MATRIX_FAMILIES]


def recurrent_ops(graph: Graph) -> NDArray[np.bool_]:
    """Forward and backward ops of recurrent layers: those of layers traced step by step, and
    cuDNN's own."""
    noted = graph.meta.get("recurrent")
    layers = {path for path in noted if isinstance(path, str)} if isinstance(noted, list) else set()
    # One more than the modules, so that -1 (unknown) reads the last.
    is_inside = np.array([*(path in layers for path in graph.modules), False])
    is_own = np.array([*(kind.startswith(_WHOLE_NET) for kind in graph.kinds), False])
    found = is_inside[graph.op_module] | is_own[graph.op_kind]
    return np.asarray(found & (graph.op_phase != Phase.OPTIMIZER))


def products_of(graph: Graph, family: IntArray) -> FloatArray:
    """Matrix products per time step that each op of a recurrent layer stands for; 0 for its other
    ops.

    CPUs run some layers as one op, with one product per time step forward and two backward.
    """
    whole = np.array([*(_num_words(text) for text in graph.signatures), 0])[graph.op_signature]
    whole = np.where(graph.op_phase == Phase.BACKWARD, 2 * whole, whole)
    return np.where(whole > 0, whole, np.isin(family, _PRODUCTS)).astype(np.float64)


def fused_s(
    op_s: FloatArray, bare_s: FloatArray, words: NDArray[np.bool_], products: FloatArray,
    launch_s: float,
) -> FloatArray:  # fmt: skip
    """Op times with recurrent layers as fused kernels; ``bare_s`` are times without launches."""
    product_s = np.maximum(bare_s, products * WORD_KERNELS * launch_s)
    return np.where(words, np.where(products > 0, product_s, 0.0), op_s)


def fused_host_s(
    host_s: FloatArray, words: NDArray[np.bool_], products: FloatArray, op_phase: NDArray[np.int8]
) -> FloatArray:
    """Host times with recurrent layers as fused kernels."""
    return np.where(words, products * np.array([*WORD_HOST_S, 0.0])[op_phase], host_s)


def as_tf32(kind: DeviceKind) -> DeviceKind:
    """The device type with cuDNN's rate for 32-bit recurrent layers (TF32)."""
    rate = kind.peak_flops.get("tf32")
    return kind if rate is None else replace(kind, peak_flops={**kind.peak_flops, "float32": rate})


def _num_words(signature: str) -> int:
    """Time steps of a fused op, times its layers and directions."""
    if not signature.startswith((_WHOLE_LAYER, _WHOLE_NET)):
        return 0
    # The input, and after flat weights the states: one per layer and direction, and sample.
    shapes = [shape for shape in tensor_shapes(signature) if len(shape) == 3]
    if not shapes:
        return 0
    given = shapes[0]
    if signature.startswith(_WHOLE_LAYER) or len(shapes) == 1:
        return given[0]
    layers, samples, _ = shapes[1]
    return layers * (given[0] if given[1] == samples else given[1])


Launches = Literal["eager", "replayed"]
LAUNCHES: tuple[Launches, ...] = get_args(Launches)
_SETTINGS = "settings of the costs"
_MAX_LISTED = 6
"""Most op kinds that an error lists."""


def estimate_costs(
    graph: Graph,
    cluster: Cluster,
    *,
    calibration: Calibration | None = None,
    profile: Profile | None = None,
    launches: Launches = "eager",
) -> Costs:
    """Op times on each device type of the cluster, and transfer times.

    ``launches`` selects eager dispatch, op by op, or the replay of a captured graph.

    Raises `UsageError` if a profile or calibration has no figure for the graph or the cluster.
    """
    if calibration is not None:
        _require_kind("calibration", calibration.device_types, cluster)
    if profile is not None:
        _require_kind("profile", (profile.device_kind,), cluster)
        _require_measured(graph, profile)
    rows = [_op_times(graph, kind, calibration, profile, launches) for kind in cluster.kinds]
    stated = graph.stated if cluster.uses_stated_times else None
    reserved_bytes = [
        profile.reserved_bytes if profile is not None and profile.device_kind == kind.name else 0
        for kind in cluster.kinds
    ]
    return Costs(
        kind_names=tuple(kind.name for kind in cluster.kinds),
        op_s=np.array([row.op_s for row in rows]).reshape(len(rows), graph.num_ops),
        op_source=np.array([row.source for row in rows]).reshape(len(rows), graph.num_ops),
        is_host_bound=any(row.is_host_bound for row in rows),
        device_row=device_rows(cluster),
        routes=cluster.routes,
        tensor_bytes=graph.tensor_bytes,
        tensor_s=None if stated is None else stated.tensor_s,
        reserved_bytes=np.array(reserved_bytes, dtype=np.int64),
        settings={
            "calibration": None if calibration is None else calibration_to_dict(calibration),
            "profile": None if profile is None else profile_to_dict(profile),
            **({} if launches == "eager" else {"launches": launches}),
        },
    )


def costs_from_settings(graph: Graph, cluster: Cluster, settings: Mapping[str, Any]) -> Costs:
    """Compute costs again from their ``settings``."""
    found = _read_settings(settings)
    try:
        return estimate_costs(
            graph, cluster, calibration=found.calibration, profile=found.profile,
            launches=found.launches,
        )  # fmt: skip
    except UsageError as error:
        # No option of the user is wrong here, but the file that holds the settings.
        raise InputFileError(error.message, hint=error.hint, where=_SETTINGS) from None


class _Settings(NamedTuple):
    calibration: Calibration | None
    profile: Profile | None
    launches: Launches


def _read_settings(settings: Mapping[str, Any]) -> _Settings:
    with fields.located(_SETTINGS):
        known = fields.record(
            settings, "the settings", optional=("calibration", "profile", "launches")
        )
        launches = fields.choice(known.get("launches", "eager"), "launches", LAUNCHES)
    calibration, profile = known.get("calibration"), known.get("profile")
    return _Settings(
        None
        if calibration is None
        else calibration_from_dict(calibration, f"{_SETTINGS}: calibration"),
        None if profile is None else profile_from_dict(profile, f"{_SETTINGS}: profile"),
        cast(Launches, launches),
    )


class KindWork(NamedTuple):
    """Times of ops on one device type and on its host, separately."""

    device_s: FloatArray
    """Seconds of arithmetic or memory traffic without launches: measured, or from attained rates.
    """
    host_s: FloatArray
    """Seconds in which the host issues each op.

    0 on a CPU, and in a replayed graph, where the gap between kernels is device time of each
    stream.
    """
    fill: FloatArray
    """Fraction of the device that each op's kernels occupy, if measured in a replayed step; else
    NaN."""
    beside: FloatArray
    """Slowdown of each op beside a second replay of the same step, if measured; else NaN."""
    mean_host_s: float
    """Host time of the mean forward op; 0 where ``host_s`` is 0."""


def work_on(graph: Graph, kind: DeviceKind, settings: Mapping[str, Any]) -> KindWork:
    """Device and host times of ops on a device type, from the settings of its costs."""
    found = _read_settings(settings)
    measured = found.profile
    if measured is not None and measured.device_kind != kind.name:
        measured = None
    fit = _fit_of(graph, kind, found.calibration, measured, found.launches)
    host = _host_of(fit, kind, measured, found.launches)
    device_s = _device_s(graph, kind, replace(fit, launch_s=0.0))
    if measured is not None:
        seconds = measured_op_s(graph, measured) - _launches_s(graph, kind, fit)
        known = np.isfinite(seconds) & ~_is_update(graph)
        device_s = np.where(known, np.maximum(seconds, 0.0), device_s)
    in_place_s, fill, beside = np.full((3, graph.num_ops), np.nan)
    if measured is not None and found.launches == "replayed":
        in_place_s, fill, beside = _replayed(graph, measured)
    scale = _scale(found.calibration, kind)
    issued = scale * (host.overlaps and found.launches == "eager")
    return KindWork(
        # Hardly anything lies between kernels in their place.
        scale * np.where(np.isfinite(in_place_s), in_place_s, device_s),
        _issue_s(graph, kind, host) * issued,
        fill,
        beside,
        host.forward_s * issued,
    )


def _launches_s(graph: Graph, kind: DeviceKind, fit: KindFit) -> FloatArray:
    """Gap between kernels that is contained in each op's time on a stream."""
    launch_s = fit.figures(kind).launch_s
    return np.asarray(launch_s * work_of(graph).shaped_on(kind).kernels)


def _as_replayed(graph: Graph, kind: DeviceKind, fit: KindFit, seconds: FloatArray) -> FloatArray:
    """Times in a replayed graph of ops that were timed on a stream.

    The gap to the next kernel is shorter there, once per kernel; optimizer updates share kernels.
    """
    on_stream_s = _launches_s(graph, kind, fit)
    in_graph_s = np.minimum(
        _launches_s(graph, kind, replace(fit, launch_s=REPLAYED.forward_s)), on_stream_s
    )
    shorter_s = np.maximum(seconds - (on_stream_s - in_graph_s), np.minimum(seconds, in_graph_s))
    return np.where(_is_update(graph), seconds, shorter_s)


def _replayed(graph: Graph, profile: Profile) -> FloatArray:
    """Seconds, occupied fraction and slowdown of ops in a replayed step; NaN if not measured."""
    # One more than the signatures, so that -1 (unknown) reads the last.
    table = np.full((3, len(graph.signatures) + 1), np.nan)
    for index, signature in enumerate(graph.signatures):
        entry = profile.by_signature.get(signature)
        if entry is not None and entry.replayed is not None:
            found = entry.replayed
            table[:, index] = found.seconds, found.fill, found.beside or np.nan
    profiled: FloatArray = table[:, graph.op_signature]
    return profiled


def _is_update(graph: Graph) -> BoolArray:
    return np.asarray(graph.op_phase == Phase.OPTIMIZER)


def _device_s(graph: Graph, kind: DeviceKind, fit: KindFit) -> FloatArray:
    """Roofline seconds of each op, with recurrent layers as accelerators run them."""
    work = work_of(graph)
    op_s = roofline_s(work, kind, fit)
    words = recurrent_ops(graph)
    if kind.is_cpu or not words.any():
        return op_s
    bare_s = roofline_s(work, as_tf32(kind), replace(fit, launch_s=0.0, peak_flops={}))
    products = products_of(graph, work.family)
    return fused_s(op_s, bare_s, words, products, fit.figures(kind).launch_s)


def _issue_s(graph: Graph, kind: DeviceKind, host: HostOverhead) -> FloatArray:
    """Seconds in which the host issues each op."""
    host_s = issue_s(host, graph.kinds, graph.op_kind, graph.op_phase)
    words = recurrent_ops(graph)
    if kind.is_cpu or host is REPLAYED or not words.any():
        return host_s
    return fused_host_s(host_s, words, products_of(graph, work_of(graph).family), graph.op_phase)


def _require_kind(what: str, kinds: tuple[str, ...], cluster: Cluster) -> None:
    known = [kind.name for kind in cluster.kinds]
    if not set(known).isdisjoint(kinds):
        return
    raise UsageError(
        f"the {what} is of {_listed(kinds)}, but the hardware has only {_listed(known)}",
        hint=f"leave the {what} out, or make one on this hardware",
    )


def _require_measured(graph: Graph, profile: Profile) -> None:
    require_times(profile)
    if graph.num_ops and not np.isfinite(measured_op_s(graph, profile)).any():
        raise UsageError(
            f"the profile has no time for any of the {graph.num_ops} ops of {graph.name!r}",
            hint="profile the same model and batch, or use a calibration: it holds for any model",
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(fields.shown(name) for name in names[:_MAX_LISTED])
    return (shown or "no kind") + (", …" if len(names) > _MAX_LISTED else "")


class _OpTimes(NamedTuple):
    """Seconds and source of every op on one device type."""

    op_s: FloatArray
    source: NDArray[np.uint8]
    is_host_bound: bool = False


def _op_times(
    graph: Graph,
    kind: DeviceKind,
    calibration: Calibration | None,
    profile: Profile | None,
    launches: Launches,
) -> _OpTimes:
    measured = profile if profile is not None and profile.device_kind == kind.name else None
    fit = _fit_of(graph, kind, calibration, measured, launches)
    op_s = _device_s(graph, kind, fit)
    source = np.full(graph.num_ops, TimeSource.MODEL, dtype=np.uint8)
    if measured is not None:
        seconds = measured_op_s(graph, measured)
        if launches == "replayed" and not kind.is_cpu:
            in_place_s, *_ = _replayed(graph, measured)
            seconds = np.where(
                np.isfinite(in_place_s), in_place_s, _as_replayed(graph, kind, fit, seconds)
            )
        known = np.isfinite(seconds)
        op_s = np.where(known, seconds, op_s)
        source[known] = TimeSource.PROFILE
    stated = stated_op_s(graph, kind)
    if stated is not None:
        return _OpTimes(stated, np.full_like(source, TimeSource.FILE))
    host = _host_of(fit, kind, measured, launches)
    host_s = _issue_s(graph, kind, host)
    is_host_bound = host.overlaps and float(host_s.sum()) > float(op_s.sum())
    op_s = with_host_overhead(op_s, host_s, host.overlaps)
    return _OpTimes(op_s * _scale(calibration, kind), source, is_host_bound)


def _scale(calibration: Calibration | None, kind: DeviceKind) -> float:
    """Correction of all op times by measured runs."""
    steps = {} if calibration is None else calibration.steps
    return steps[kind.name].scale if kind.name in steps else 1.0


def _fit_of(
    graph: Graph,
    kind: DeviceKind,
    calibration: Calibration | None,
    measured: Profile | None,
    launches: Launches,
) -> KindFit:
    if calibration is not None and kind.name in calibration.kinds:
        return calibration.kinds[kind.name]
    if measured is not None:
        return calibrate(measured, kind).kinds[kind.name]
    if launches == "replayed" and not kind.is_cpu:
        # No host issues the kernels of a replayed graph one by one.
        return KindFit(launch_s=REPLAYED.forward_s, host=REPLAYED)
    return KindFit(host=_usual_host(graph, kind))


def _host_of(
    fit: KindFit, kind: DeviceKind, measured: Profile | None, launches: Launches
) -> HostOverhead:
    if launches == "replayed" and not kind.is_cpu:
        return REPLAYED
    return fit.host if measured is None else measured.host


def _usual_host(graph: Graph, kind: DeviceKind) -> HostOverhead:
    """Host overhead of captured ops, which a framework dispatches; zero for ops of other graphs."""
    if not graph.signatures or kind.is_cpu:
        return HostOverhead()
    return measured_host(kind.dispatch_s) if kind.dispatch_s else EAGER


def measured_op_s(graph: Graph, profile: Profile) -> FloatArray:
    """Measured seconds of each op by its signature; NaN if the profile lacks it."""
    by_signature = profile.by_signature
    # One more than the signatures, so that -1 (unknown) reads the last: NaN.
    seconds = np.full(len(graph.signatures) + 1, np.nan)
    for index, signature in enumerate(graph.signatures):
        if signature in by_signature:
            seconds[index] = by_signature[signature].seconds
    op_s: FloatArray = seconds[graph.op_signature]
    return op_s
