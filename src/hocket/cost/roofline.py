"""Costs of a graph on a cluster: from the roofline, from a profile, or stated by the graph's file.

A later source replaces the earlier one op by op, and every number records its source. Ops that a
profile lacks get the roofline fitted to that profile. O(device types · ops), numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

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
from hocket.cost.efficiency import KindFit, OpWork, roofline_s, work_of
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

# Recurrent layers as cuDNN runs them, in graphs that have one product per time step (Appleyard,
# Kocisky and Blunsom 2016, "Optimizing Performance of Recurrent Neural Networks on GPUs"). The
# products with the inputs of all time steps are one, gradients of weights are summed in one, and
# each time step and layer is one product with the state and one kernel for all gates. A graph that
# was captured without a GPU has ten to thirty ops per time step instead. So its products keep the
# time of their arithmetic, each time step takes the host as long as cuDNN's launches, and the ops
# between the products take no time. O(ops), numpy.

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
    # One entry more than modules and kinds: -1 (unknown) selects the last.
    is_inside = np.array([*(path in layers for path in graph.modules), False])
    is_own = np.array([*(kind.startswith(_WHOLE_NET) for kind in graph.kinds), False])
    found = is_inside[graph.op_module] | is_own[graph.op_kind]
    return np.asarray(found & (graph.op_phase != Phase.OPTIMIZER))


def products_of(graph: Graph, family: IntArray) -> FloatArray:
    """Number of matrix products that each op of a recurrent layer represents; 0 for its other ops.

    CPUs run some layers as one op, with one product per time step forward and two backward.
    """
    whole = np.array([*(_num_words(text) for text in graph.signatures), 0])[graph.op_signature]
    whole = np.where(graph.op_phase == Phase.BACKWARD, 2 * whole, whole)
    return np.where(whole > 0, whole, np.isin(family, _PRODUCTS)).astype(np.float64)


def as_tf32(kind: DeviceKind) -> DeviceKind:
    """The device type with cuDNN's rate for 32-bit recurrent layers (TF32)."""
    rate = kind.peak_flops.get("tf32")
    return kind if rate is None else replace(kind, peak_flops={**kind.peak_flops, "float32": rate})


def _num_words(signature: str) -> int:
    """Time steps of a fused op, times its layers and directions."""
    if not signature.startswith((_WHOLE_LAYER, _WHOLE_NET)):
        return 0
    # Tensors of three dimensions are the input and, after flat weights, the states of all layers.
    shapes = [shape for shape in tensor_shapes(signature) if len(shape) == 3]
    if not shapes:
        return 0
    given = shapes[0]
    if signature.startswith(_WHOLE_LAYER) or len(shapes) == 1:
        return given[0]
    # Inputs are [time, batch, width] or, with batch_first, [batch, time, width].
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
    rows = [
        _KindCosts.of(graph, kind, calibration, profile, launches).op_times()
        for kind in cluster.kinds
    ]
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
        return estimate_costs(graph, cluster, **found._asdict())
    except UsageError as error:
        # The file with the settings is wrong, not an option of the user.
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
        launches,
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
    return _KindCosts.of(graph, kind, **_read_settings(settings)._asdict()).work_parts()


class _OpTimes(NamedTuple):
    """Seconds and source of every op on one device type."""

    op_s: FloatArray
    source: NDArray[np.uint8]
    is_host_bound: bool = False


@dataclass(frozen=True, eq=False)
class _KindCosts:
    """Costs of a graph's ops on one device type."""

    graph: Graph
    kind: DeviceKind
    calibration: Calibration | None
    profile: Profile | None
    """Measurements on this device type; None without."""
    is_replayed: bool
    """True if the step is replayed as a CUDA graph."""

    @classmethod
    def of(
        cls,
        graph: Graph,
        kind: DeviceKind,
        calibration: Calibration | None,
        profile: Profile | None,
        launches: Launches,
    ) -> _KindCosts:
        is_of_kind = profile is not None and profile.device_kind == kind.name
        is_replayed = launches == "replayed" and not kind.is_cpu
        return cls(graph, kind, calibration, profile if is_of_kind else None, is_replayed)

    @cached_property
    def work(self) -> OpWork:
        """Work of the ops."""
        return work_of(self.graph)

    @cached_property
    def fit(self) -> KindFit:
        """Fitted efficiencies: calibrated, from the profile, or the defaults."""
        if self.calibration is not None and self.kind.name in self.calibration.kinds:
            return self.calibration.kinds[self.kind.name]
        if self.profile is not None:
            return calibrate(self.profile, self.kind).kinds[self.kind.name]
        if self.is_replayed:
            # The host does not launch the kernels of a replayed graph one by one.
            return KindFit(launch_s=REPLAYED.forward_s, host=REPLAYED)
        # Only captured ops are dispatched by a framework.
        if not self.graph.signatures or self.kind.is_cpu:
            return KindFit()
        dispatch_s = self.kind.dispatch_s
        return KindFit(host=measured_host(dispatch_s) if dispatch_s else EAGER)

    @property
    def host(self) -> HostOverhead:
        """Host overhead per op."""
        if self.is_replayed:
            return REPLAYED
        return self.fit.host if self.profile is None else self.profile.host

    @property
    def scale(self) -> float:
        """Correction of all op times by measured runs."""
        steps = {} if self.calibration is None else self.calibration.steps
        return steps[self.kind.name].scale if self.kind.name in steps else 1.0

    @cached_property
    def recurrent(self) -> BoolArray:
        """Ops that run as part of cuDNN's recurrent layers; all False on a CPU."""
        found = recurrent_ops(self.graph)
        return np.zeros_like(found) if self.kind.is_cpu else found

    def op_times(self) -> _OpTimes:
        """Times of ops with their waits for the host."""
        op_s = self._device_s(self.fit)
        source = np.full(self.graph.num_ops, TimeSource.MODEL, dtype=np.uint8)
        stated = stated_op_s(self.graph, self.kind)
        # Times that the graph's file states are final.
        if stated is not None:
            return _OpTimes(stated, np.full_like(source, TimeSource.FILE))
        if self.profile is not None:
            seconds = measured_op_s(self.graph, self.profile)
            if self.is_replayed:
                in_place_s, *_ = _replayed(self.graph, self.profile)
                is_known = np.isfinite(in_place_s)
                seconds = np.where(is_known, in_place_s, self._as_replayed(seconds))
            known = np.isfinite(seconds)
            op_s = np.where(known, seconds, op_s)
            source[known] = TimeSource.PROFILE
        host_s = self._issue_s()
        is_host_bound = self.host.overlaps and float(host_s.sum()) > float(op_s.sum())
        op_s = with_host_overhead(op_s, host_s, self.host.overlaps)
        return _OpTimes(op_s * self.scale, source, is_host_bound)

    def work_parts(self) -> KindWork:
        """Times of ops on device and host, separately."""
        device_s = self._device_s(replace(self.fit, launch_s=0.0))
        in_place_s, fill, beside = np.full((3, self.graph.num_ops), np.nan)
        if self.profile is not None:
            seconds = measured_op_s(self.graph, self.profile) - self._launches_s(self.fit)
            known = np.isfinite(seconds) & ~self._is_update
            device_s = np.where(known, np.maximum(seconds, 0.0), device_s)
            if self.is_replayed:
                in_place_s, fill, beside = _replayed(self.graph, self.profile)
        issued = self.scale * (self.host.overlaps and not self.is_replayed)
        return KindWork(
            # In a replayed step almost no time passes between kernels.
            self.scale * np.where(np.isfinite(in_place_s), in_place_s, device_s),
            self._issue_s() * issued,
            fill,
            beside,
            self.host.forward_s * issued,
        )

    @property
    def _is_update(self) -> BoolArray:
        return np.asarray(self.graph.op_phase == Phase.OPTIMIZER)

    def _device_s(self, fit: KindFit) -> FloatArray:
        """Roofline seconds of each op, with recurrent layers as cuDNN runs them."""
        op_s = roofline_s(self.work, self.kind, fit)
        if not self.recurrent.any():
            return op_s
        bare = replace(fit, launch_s=0.0, peak_flops={})
        products = products_of(self.graph, self.work.family)
        launches_s = products * WORD_KERNELS * fit.figures(self.kind).launch_s
        product_s = np.maximum(roofline_s(self.work, as_tf32(self.kind), bare), launches_s)
        return np.where(self.recurrent, np.where(products > 0, product_s, 0.0), op_s)

    def _issue_s(self) -> FloatArray:
        """Seconds in which the host issues each op."""
        graph, host = self.graph, self.host
        host_s = issue_s(host, graph.kinds, graph.op_kind, graph.op_phase)
        if self.is_replayed or not self.recurrent.any():
            return host_s
        products = products_of(graph, self.work.family)
        word_s = np.array([*WORD_HOST_S, 0.0])[graph.op_phase]
        return np.where(self.recurrent, products * word_s, host_s)

    def _launches_s(self, fit: KindFit) -> FloatArray:
        """Gap between kernels that is part of each op's time on a stream."""
        kernels = self.work.shaped_on(self.kind).kernels
        return np.asarray(fit.figures(self.kind).launch_s * kernels)

    def _as_replayed(self, seconds: FloatArray) -> FloatArray:
        """Times in a replayed graph of ops that were timed on a stream.

        The gap after each kernel is shorter there. Optimizer updates share kernels, so their times
        stay.
        """
        on_stream_s = self._launches_s(self.fit)
        replayed = replace(self.fit, launch_s=REPLAYED.forward_s)
        in_graph_s = np.minimum(self._launches_s(replayed), on_stream_s)
        shorter_s = seconds - (on_stream_s - in_graph_s)
        shorter_s = np.maximum(shorter_s, np.minimum(seconds, in_graph_s))
        return np.where(self._is_update, seconds, shorter_s)


def _replayed(graph: Graph, profile: Profile) -> FloatArray:
    """Seconds, occupied fraction and slowdown of ops in a replayed step; NaN if not measured."""
    # One entry more than signatures, because -1 (unknown) indexes the last one: NaN.
    table = np.full((3, len(graph.signatures) + 1), np.nan)
    for index, signature in enumerate(graph.signatures):
        entry = profile.by_signature.get(signature)
        if entry is not None and entry.replayed is not None:
            found = entry.replayed
            table[:, index] = found.seconds, found.fill, found.beside or np.nan
    profiled: FloatArray = table[:, graph.op_signature]
    return profiled


def _require_kind(what: str, kinds: tuple[str, ...], cluster: Cluster) -> None:
    known = [kind.name for kind in cluster.kinds]
    if not set(known).isdisjoint(kinds):
        return
    raise UsageError(
        f"the {what} is of {_listed(kinds)}, but the cluster has only {_listed(known)}",
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


def measured_op_s(graph: Graph, profile: Profile) -> FloatArray:
    """Measured seconds of each op by its signature; NaN if the profile lacks it."""
    by_signature = profile.by_signature
    # One entry more than signatures, because -1 (unknown) indexes the last one: NaN.
    seconds = np.full(len(graph.signatures) + 1, np.nan)
    for index, signature in enumerate(graph.signatures):
        if signature in by_signature:
            seconds[index] = by_signature[signature].seconds
    op_s: FloatArray = seconds[graph.op_signature]
    return op_s
