"""Fit the roofline to a profile: efficiencies per op family and dtype, and the launch floor.

The best pair of efficiencies (arithmetic, memory) minimises the sum of |log(predicted / measured)|,
each op weighted by its part of the step, among ratios that some measurement shows; both are then
scaled so that the family's total agrees. At most 48 x 48 pairs per family and dtype. O(pairs ·
entries).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hocket.base import fields
from hocket.base.arrays import BoolArray, FloatArray
from hocket.base.atomic import write_atomically
from hocket.base.errors import UsageError
from hocket.base.jsonfile import dump_json, read_json
from hocket.cost.efficiency import (
    DEFAULT_EFFICIENCY,
    Efficiency,
    KindFit,
    ideal_s,
    roofline_s,
)
from hocket.cost.families import FAMILIES
from hocket.cost.profile import (
    MAX_FILE_BYTES,
    MAX_SECONDS,
    Profile,
    check_schema,
    host_from_dict,
    require_times,
)
from hocket.cost.ranges import StepRange
from hocket.graph.graph import DTYPES
from hocket.hardware.cluster import DeviceKind

CALIBRATION_SCHEMA = "hocket.calibration/1"
MAX_CANDIDATES = 48
MIN_EFFICIENCY, MAX_EFFICIENCY = 1e-4, 4.0
"""Bounds of fitted efficiencies. Values above 1 occur if caches serve part of the bytes, or if
fewer operations are executed than counted."""
MIN_SHARE = 0.01
"""Families below this fraction of the measured time keep their defaults: too little evidence."""
FLOOR_RATIO = 20.0
"""Ops that take this many times their ideal time are dominated by their launch, not by their work.
"""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Fitted efficiencies by device type."""

    kinds: Mapping[str, KindFit]
    source: str = ""
    """Source of the fit."""
    steps: Mapping[str, StepRange] = field(default_factory=dict)
    """Correction and range of whole steps by device type, fitted to runs of users."""

    @property
    def device_types(self) -> tuple[str, ...]:
        """Device types with any fitted figure."""
        return tuple(dict.fromkeys((*self.kinds, *self.steps)))


@dataclass(frozen=True)
class FamilyError:
    """Measured and fitted time of one family."""

    family: str
    measured_s: float
    """Time of the family in the profiled step."""
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else 0.0


def calibrate(profile: Profile, kind: DeviceKind) -> Calibration:
    """Fit that makes the roofline of ``kind`` agree with a profile measured on it."""
    if profile.device_kind != kind.name:
        raise UsageError(
            f"the profile is of {profile.device_kind!r}, not of {kind.name!r}",
            hint="name the kind that the profile was measured on",
        )
    require_times(profile)
    work = profile.work()
    measured_s = np.array([entry.seconds for entry in profile.entries], dtype=np.float64)
    count = np.array([entry.count for entry in profile.entries], dtype=np.float64)
    spent_s = count * measured_s
    compute_s, memory_s = ideal_s(work, kind)
    # Ops that neither compute nor move bytes say nothing about rates.
    usable = (measured_s > 0) & ((compute_s > 0) | (memory_s > 0))
    floor_s = _launch_floor_s(measured_s[usable], (compute_s + memory_s)[usable], kind)
    launch_s = kind.launch_s if floor_s is None else floor_s
    kernels = work.shaped_on(kind).kernels
    efficiency: dict[str, Efficiency] = {}
    for index, family in enumerate(FAMILIES):
        member = usable & (work.family == index)
        # The whole family first: it serves number types that were not measured.
        parts: dict[str, BoolArray] = {family: member}
        parts |= {
            f"{family}/{dtype}": member & (work.dtype == number)
            for number, dtype in enumerate(DTYPES)
        }
        for key, part in parts.items():
            if part.any() and spent_s[part].sum() >= MIN_SHARE * spent_s.sum():
                efficiency[key] = _best_efficiency(
                    measured_s[part], compute_s[part], memory_s[part],
                    spent_s[part], launch_s * kernels[part], DEFAULT_EFFICIENCY[family],
                )  # fmt: skip
    fit = KindFit(
        efficiency, launch_s, profile.host, dict(kind.peak_flops), kind.memory_bandwidth_bps
    )
    return Calibration({kind.name: fit}, f"{len(profile.entries)} signatures on {profile.device}")


def calibration_errors(
    calibration: Calibration, profile: Profile, kind: DeviceKind
) -> tuple[FamilyError, ...]:
    """Measured and predicted time of each family in the profiled step."""
    work = profile.work()
    count = np.array([entry.count for entry in profile.entries], dtype=np.float64)
    measured_s = count * np.array([entry.seconds for entry in profile.entries])
    predicted_s = count * roofline_s(work, kind, calibration.kinds.get(kind.name))
    return tuple(
        FamilyError(family, float(measured_s[member].sum()), float(predicted_s[member].sum()))
        for index, family in enumerate(FAMILIES)
        if (member := work.family == index).any()
    )


def _launch_floor_s(measured_s: FloatArray, best_s: FloatArray, kind: DeviceKind) -> float | None:
    """Lower quartile of the times of small ops that are dominated by their launch; None without
    such ops."""
    tiny = (measured_s >= FLOOR_RATIO * best_s) & (best_s <= max(kind.launch_s, 1e-6))
    # The lower quartile, since some small ops have real work or several launches.
    return float(np.quantile(measured_s[tiny], 0.25, method="lower")) if tiny.any() else None


def _best_efficiency(
    measured_s: FloatArray,
    compute_s: FloatArray,
    memory_s: FloatArray,
    weight: FloatArray,
    launch_s: FloatArray,
    default: Efficiency,
) -> Efficiency:
    compute = _candidates(compute_s, measured_s, weight, default.compute)
    memory = _candidates(memory_s, measured_s, weight, default.memory)
    compute_part = np.maximum(compute_s / compute[:, None], launch_s)
    memory_part = memory_s / memory[:, None]
    log_measured = np.log(measured_s)
    share = weight / weight.sum()
    loss = np.array(
        [
            np.abs(np.log(np.maximum(row, memory_part)) - log_measured) @ share
            for row in compute_part
        ]
    )
    # Of equal losses the highest efficiencies win: the other limit then explains the time.
    # Rounded, so that equal losses are equal in spite of summation order.
    best = int(np.argmin(np.round(loss, 12)))
    row, column = divmod(best, len(memory))
    predicted_s = np.maximum(compute_part[row], memory_part[column])
    # Times that the launch floor explains say nothing about rates.
    rated = predicted_s > launch_s
    scale = _total_ratio(predicted_s[rated], measured_s[rated], weight[rated])
    by_compute = compute_part[row] > memory_part[column]
    return Efficiency(
        _scaled(compute[row], scale if (rated & by_compute).any() else 1.0),
        _scaled(memory[column], scale if (rated & ~by_compute).any() else 1.0),
    )


def _scaled(efficiency: float, scale: float) -> float:
    return float(np.clip(efficiency * scale, MIN_EFFICIENCY, MAX_EFFICIENCY))


def _total_ratio(predicted_s: FloatArray, measured_s: FloatArray, weight: FloatArray) -> float:
    """Predicted over measured time of a step, with op weights."""
    if not len(measured_s):
        return 1.0
    return float((predicted_s * (weight / measured_s)).sum() / weight.sum())


def _candidates(
    ideal: FloatArray, measured_s: FloatArray, weight: FloatArray, default: float
) -> FloatArray:
    """Efficiencies to try, highest first: those that would explain one of the measurements."""
    ratios = np.clip(ideal / measured_s, MIN_EFFICIENCY, MAX_EFFICIENCY)[ideal > 0]
    if len(ratios) == 0:
        return np.array([default])
    order = np.argsort(ratios, kind="stable")
    ratios, reached = ratios[order], np.cumsum(weight[ideal > 0][order])
    if len(ratios) > MAX_CANDIDATES:
        # Evenly over the time of the step, so that what matters most is resolved best.
        steps = np.linspace(0, reached[-1], MAX_CANDIDATES)
        ratios = ratios[np.minimum(np.searchsorted(reached, steps), len(ratios) - 1)]
    # If this limit never binds, its ratios are only lower bounds of the efficiency: add the
    # default.
    return np.unique(np.append(ratios, max(default, float(ratios[-1]))))[::-1]


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def write_calibration(calibration: Calibration, path: str | Path) -> None:
    """Write a calibration file, atomically."""
    write_atomically(path, dump_json(calibration_to_dict(calibration)))


def read_calibration(path: str | Path) -> Calibration:
    """Read a calibration file; raises `InputFileError` for anything else."""
    return calibration_from_dict(read_json(path, MAX_FILE_BYTES), str(path))


def calibration_to_dict(calibration: Calibration) -> dict[str, Any]:
    """The calibration as JSON values."""
    kinds = {
        name: {
            "launch_s": fit.launch_s,
            "host": asdict(fit.host),
            "peak_flops": dict(sorted(fit.peak_flops.items())),
            "memory_bandwidth_bps": fit.memory_bandwidth_bps,
            "efficiency": {key: asdict(fit.efficiency[key]) for key in sorted(fit.efficiency)},
        }
        for name, fit in sorted(calibration.kinds.items())
    }
    steps = {name: asdict(found) for name, found in sorted(calibration.steps.items())}
    data = {"schema": CALIBRATION_SCHEMA, "source": calibration.source, "kinds": kinds}
    return {**data, "steps": steps} if steps else data


def calibration_from_dict(data: object, where: str) -> Calibration:
    """Read a calibration from `calibration_to_dict`; ``where`` names its file in errors."""
    with fields.located(where):
        check_schema(
            data, CALIBRATION_SCHEMA, "make one with hocket calibrate; a profile goes to --profile"
        )
        top = fields.record(
            data, "the calibration", required=("schema", "kinds"), optional=("source", "steps")
        )
        fields.choice(top["schema"], "schema", (CALIBRATION_SCHEMA,))
        kinds = fields.mapping(top["kinds"], "kinds")
        return Calibration(
            {name: _fit(kinds[name], fields.inside("kinds", name)) for name in sorted(kinds)},
            fields.text(top.get("source", ""), "source"),
            {
                name: _step_range(found, fields.inside("steps", name))
                for name, found in sorted(fields.mapping(top.get("steps", {}), "steps").items())
            },
        )


def _step_range(data: object, path: str) -> StepRange:
    names = ("low", "high", "rows", "ratio", "source", "scale")
    found = fields.record(data, path, required=names)
    low, high, ratio, scale = (
        fields.number(found[name], f"{path}.{name}", 1e-6, 1e6)
        for name in ("low", "high", "ratio", "scale")
    )
    rows = fields.integer(found["rows"], f"{path}.rows", 1, 10**9)
    source = fields.text(found["source"], f"{path}.source")
    return StepRange(low, high, rows, ratio, source, scale)


def _fit(data: object, path: str) -> KindFit:
    optional = ("launch_s", "host", "peak_flops", "memory_bandwidth_bps")
    fit = fields.record(data, path, required=("efficiency",), optional=optional)
    launch_s, bandwidth_bps = fit.get("launch_s"), fit.get("memory_bandwidth_bps")
    peaks_path = f"{path}.peak_flops"
    peaks = fields.record(fit.get("peak_flops", {}), peaks_path, optional=(*DTYPES, "tf32"))
    return KindFit(
        _efficiencies(fit["efficiency"], f"{path}.efficiency"),
        None if launch_s is None else fields.number(launch_s, f"{path}.launch_s", 0, MAX_SECONDS),
        host_from_dict(fit["host"], f"{path}.host") if "host" in fit else KindFit().host,
        {
            dtype: fields.number(peaks[dtype], f"{peaks_path}.{dtype}", 1, 1e24)
            for dtype in sorted(peaks)
        },
        None
        if bandwidth_bps is None
        else fields.number(bandwidth_bps, f"{path}.memory_bandwidth_bps", 1, 1e24),
    )


def _efficiencies(data: object, path: str) -> dict[str, Efficiency]:
    known = [f"{family}{end}" for family in FAMILIES for end in ("", *(f"/{d}" for d in DTYPES))]
    efficiencies = {}
    for key, value in sorted(fields.record(data, path, optional=known).items()):
        place = fields.inside(path, key)
        pair = fields.record(value, place, required=("compute", "memory"))
        efficiencies[key] = Efficiency(
            fields.number(pair["compute"], f"{place}.compute", MIN_EFFICIENCY, 10.0),
            fields.number(pair["memory"], f"{place}.memory", MIN_EFFICIENCY, 10.0),
        )
    return efficiencies
