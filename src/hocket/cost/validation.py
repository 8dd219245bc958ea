"""Compare predictions with published measurements.

Predictions are scored twice: zero-shot, and calibrated with at most ten runs per site. Runs used
for a calibration are not scored in the calibrated part. They are selected by their configurations,
never by their times.
"""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import InputFileError, unknown_name
from hocket.cost.parallel.calibrate import MIN_RUNS, NOISE, calibrate
from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.measured_runs import MeasuredRun, read_runs
from hocket.cost.parallel.overheads import (
    FORMULAS_ONLY,
    GIVEN_BACK,
    MemoryOverheads,
    fit_overheads,
)
from hocket.cost.parallel.similarity import UNEXPLAINED, similarity_of_runs
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.stage_memory import stage_memory
from hocket.cost.parallel.step import predict
from hocket.hardware.cluster import Cluster, Device
from hocket.hardware.shorthand import NETWORK, cluster_from_text
from hocket.transformer import ParallelConfigs, Transformer


@dataclass(frozen=True, kw_only=True)
class ErrorScore:
    """Relative errors of predictions; all fields but ``bias`` summarise absolute values."""

    rows: int
    mean: float
    median: float
    p95: float
    max: float
    bias: float
    """Mean signed error; positive if predictions are too large."""


@dataclass(frozen=True, kw_only=True)
class RankingScore:
    """Quality of choices by prediction within groups of measured alternatives."""

    groups: int
    mean_regret: float
    """Relative excess of the chosen run over the best one."""
    max_regret: float
    kendall_tau: float
    """Agreement of the two orders: 1 the same, 0 unrelated, -1 reversed."""


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryScore:
    """Counts of runs with and without an out-of-memory error, and of wrong predictions."""

    ran_out: int
    missed: int
    """Runs that ran out of memory although predicted to fit."""
    ran: int
    false_alarms: int
    """Runs that fitted although predicted not to."""


def error_score(errors: FloatArray) -> ErrorScore | None:
    """Summary of relative errors; None if there are none."""
    if not len(errors):
        return None
    sizes = np.abs(errors)
    return ErrorScore(
        rows=len(errors),
        mean=float(sizes.mean()),
        median=float(np.median(sizes)),
        p95=float(np.percentile(sizes, 95)),
        max=float(sizes.max()),
        bias=float(errors.mean()),
    )


def ranking_score(rows: Sequence[MeasuredRun], predicted_s: FloatArray) -> RankingScore | None:
    """Ranking scores within groups of runs of one model with equal devices, batch and release."""
    measured_s = np.array([row.step_s for row in rows], dtype=np.float64)
    groups: dict[object, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        config = row.config
        # Releases of a program differ by up to 1.8 times at equal degrees, and users cannot choose
        # among them.
        key = (row.model, config.num_devices, config.global_batch, row.cluster, row.release)
        groups[key].append(index)
    several = [np.array(group) for group in groups.values() if len(group) > 1]
    if not several:
        return None
    regrets = [
        measured_s[group[np.argmin(predicted_s[group])]] / measured_s[group].min() - 1
        for group in several
    ]
    taus = [kendall_tau(measured_s[group], predicted_s[group]) for group in several]
    return RankingScore(
        groups=len(several),
        mean_regret=float(np.mean(regrets)),
        max_regret=float(np.max(regrets)),
        kendall_tau=float(np.mean(taus)),
    )


def kendall_tau(first: FloatArray, second: FloatArray) -> float:
    """Concordant minus discordant pairs over all pairs; ties count as neither."""
    one = np.sign(first[:, None] - first[None, :])
    other = np.sign(second[:, None] - second[None, :])
    num_pairs = len(first) * (len(first) - 1)
    return float((one * other).sum() / num_pairs) if num_pairs else 1.0


def out_of_memory_score(
    rows: Sequence[MeasuredRun], predicted_bytes: FloatArray, capacity_bytes: FloatArray
) -> OutOfMemoryScore | None:
    """Count predicted and measured runs out of memory."""
    if not rows:
        return None
    ran_out = np.array([row.is_oom for row in rows], dtype=bool)
    too_large = predicted_bytes > capacity_bytes
    return OutOfMemoryScore(
        ran_out=int(ran_out.sum()),
        missed=int((ran_out & ~too_large).sum()),
        ran=int((~ran_out).sum()),
        false_alarms=int((~ran_out & too_large).sum()),
    )


MIN_GROUPS = 4
"""Fewer groups than this have no meaningful mean regret; the worst one still counts."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest errors that pass; None if a table is reported but cannot fail."""

    zero_shot_mean: float | None = 0.15
    calibrated_mean: float | None = 0.05
    calibrated_p95: float | None = 0.15
    memory_mean: float | None = 0.06
    """Tolerance of calibrated memory, or of memory formulas for tables of computed memory."""
    mean_regret: float | None = 0.02
    max_regret: float | None = 0.10
    runs_per_false_alarm: int | None = 50
    """One false out-of-memory prediction is allowed per so many runs; None if the table does not
    state what memory depends on."""

    def violations(self, part: TableScores, is_calibrated: bool) -> list[str]:
        """Messages on scores outside of the tolerance."""
        checks: list[tuple[str, float, float | None]] = []
        if part.step and not is_calibrated:
            checks.append(("mean error", part.step.mean, self.zero_shot_mean))
        elif part.step:
            checks.append(("mean error", part.step.mean, self.calibrated_mean))
            checks.append(("95th percentile of the error", part.step.p95, self.calibrated_p95))
        if part.ranking and is_calibrated:
            limit = self.mean_regret_of(part.ranking)
            checks.append(("mean regret", part.ranking.mean_regret, limit))
            checks.append(("largest regret", part.ranking.max_regret, self.max_regret))
        if part.memory and is_calibrated:
            checks.append(("mean error of memory", part.memory.mean, self.memory_mean))
        found = [
            f"{what} is {value:.1%}, allowed {limit:.1%}"
            for what, value, limit in checks
            if limit is not None and value > limit
        ]
        return found + (self._out_of_memory(part) if is_calibrated else [])

    def mean_regret_of(self, ranking: RankingScore) -> float | None:
        """Largest mean regret that passes; None if there are too few groups."""
        return self.mean_regret if ranking.groups >= MIN_GROUPS else None

    def _out_of_memory(self, part: TableScores) -> list[str]:
        score = part.out_of_memory
        if score is None:
            return []
        found = []
        if score.missed:
            found.append(f"{score.missed} of {score.ran_out} runs out of memory are not predicted")
        runs_per_alarm = self.runs_per_false_alarm
        if runs_per_alarm and score.false_alarms > -(-score.ran // runs_per_alarm):
            found.append(f"{score.false_alarms} of {score.ran} runs are predicted not to fit")
        return found


def _tolerance(limits: dict[str, Any]) -> Tolerance:
    unjudged = dict.fromkeys(limits.pop("unjudged", ()))
    return Tolerance(**limits, **unjudged)


TABLES = Path(__file__).parent / "published"
"""Folder of the tables that come with hocket."""


def load_tables(data_dir: str | Path | None = None) -> dict[str, list[MeasuredRun]]:
    """Read the shipped tables and those of ``data_dir``, which replace shipped ones by name."""
    paths = sorted(TABLES.glob("*.csv"))
    if data_dir is not None:
        found = sorted(Path(data_dir).glob("*.csv"))
        if not found:
            raise InputFileError(
                "holds no table of measured runs (*.csv)",
                hint="python benchmarks/published/convert.py makes tables of public files",
                where=str(data_dir),
            )
        paths += found
    return {path.stem: read_runs(path) for path in paths}


_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_TOLERANCES = {table: _tolerance(limits) for table, limits in _DATA["tolerances"].items()}


def tolerance_of(table: str) -> Tolerance:
    """The tolerance of a table."""
    return _TOLERANCES.get(table, Tolerance())


# The clusters of the published measurements: presets with the network bandwidth that their owners
# state.


@dataclass(frozen=True)
class Site:
    """A machine type and its network."""

    machine: str
    network_bps: float
    """Bytes per second per host, in each direction."""
    source: str
    kind: tuple[str, float, float] | None = None
    """Name, memory and memory bandwidth if the site's devices differ from the preset."""


SITES = {name: Site(**site) for name, site in _DATA["sites"].items()}
"""Sites by the name that the tables use."""


@lru_cache(maxsize=64)
def site_cluster(name: str, num_devices: int) -> Cluster:
    """Smallest number of a site's hosts with at least ``num_devices`` devices."""
    if name not in SITES:
        raise unknown_name("site", name, SITES)
    site = SITES[name]
    per_host = cluster_from_text(site.machine).num_devices
    num_hosts = max(1, -(-num_devices // per_host))
    cluster = cluster_from_text(f"{num_hosts}x{site.machine}")
    num_links = sum(NETWORK in link.ends for link in cluster.links) // num_hosts
    return replace(
        cluster,
        name=f"{num_hosts} hosts of {name}",
        devices=_devices(cluster, site),
        links=tuple(
            replace(link, bandwidth_bps=site.network_bps / num_links)
            if NETWORK in link.ends
            else link
            for link in cluster.links
        ),
    )


def _devices(cluster: Cluster, site: Site) -> tuple[Device, ...]:
    if site.kind is None:
        return cluster.devices
    name, memory_bytes, bandwidth_bps = site.kind
    kind = replace(
        cluster.devices[0].kind,
        name=name,
        memory_bytes=round(memory_bytes),
        memory_bandwidth_bps=bandwidth_bps,
        source=site.source,
    )
    return tuple(
        replace(device, kind=kind, memory_bytes=kind.memory_bytes) for device in cluster.devices
    )


# Selection of the runs to calibrate with: similar runs share unexplained errors
# (`hocket.cost.parallel.similarity`), so a measured run reduces the variance of runs like it. The
# next run is the one that reduces the total variance of all runs the most (active learning for a
# Gaussian process, Cohn 1996). Measured times are not used. O(selected * runs^2) time, O(runs^2)
# memory.

MAX_CALIBRATION_ROWS = 10
_MAX_SHARE = 0.5
"""Largest fraction of a table used for calibration."""


def calibration_rows(rows: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Runs used for calibration, in order of selection."""
    count = min(MAX_CALIBRATION_ROWS, int(len(rows) * _MAX_SHARE))
    if not count:
        return []
    _, shared = similarity_of_runs(rows)
    return [rows[index] for index in most_telling(shared, [row.table for row in rows], count)]


def most_telling(shared: FloatArray, tables: Sequence[str], count: int) -> list[int]:
    """Positions of up to ``count`` most informative runs, at most half of each table; ties go to
    the first."""
    open_variance = UNEXPLAINED**2 * shared
    left = {table: int(rows * _MAX_SHARE) for table, rows in Counter(tables).items()}
    taken: list[int] = []
    while len(taken) < count:
        # Expected reduction of the total variance if the run's time were known (Cohn 1996).
        noisy = np.diag(open_variance) + NOISE**2
        gain = (open_variance**2).sum(axis=0) / noisy
        gain[[left[table] == 0 for table in tables]] = -1.0
        gain[taken] = -1.0
        best = int(np.argmax(gain))
        if gain[best] < 0:
            break
        taken.append(best)
        left[tables[best]] -= 1
        column = open_variance[:, best]
        open_variance = open_variance - np.outer(column, column) / noisy[best]
    return taken


FORMULA_TABLES = frozenset({"korthikanti-memory"})
"""Tables whose memory was computed, not measured: predictions add no overheads."""
MIN_WEIGHED = 5
"""Fewest runs with measured memory to which overheads are fitted."""


@dataclass(frozen=True, kw_only=True)
class TableScores:
    """Scores of one table, zero-shot or calibrated."""

    step: ErrorScore | None
    ranking: RankingScore | None
    memory: ErrorScore | None
    out_of_memory: OutOfMemoryScore | None


@dataclass(frozen=True, kw_only=True)
class TableResult:
    """Results of one table."""

    table: str
    num_rows: int
    num_calibration_rows: int
    """Runs of this table used in its site's calibration."""
    zero_shot: TableScores
    calibrated: TableScores
    tolerance: Tolerance
    violations: tuple[str, ...]
    """Messages on scores outside of the tolerance."""


@dataclass(frozen=True, kw_only=True)
class CalibratedSite:
    """Fitted coefficients of one site, and the runs they were fitted to."""

    coefficients: Coefficients
    overheads: MemoryOverheads | None
    """None if no memory was measured; the program's defaults are used."""
    timed: frozenset[tuple[str, str]]
    """Table and row of the runs that times were fitted to."""
    weighed: frozenset[tuple[str, str]]
    """Table and row of the runs that memory overheads were fitted to."""


def validate(
    tables: Mapping[str, Sequence[MeasuredRun]], names: Sequence[str] = ()
) -> list[TableResult]:
    """Results of the named tables, or of all; every table of a site calibrates that site."""
    wanted = {name: rows for name, rows in tables.items() if name in names or not names}
    sites = {name: calibrated_site(name, tables) for name in _site_names(wanted)}
    return [_table_result(name, rows, sites) for name, rows in wanted.items()]


def predict_steps(
    rows: Sequence[MeasuredRun], coefficients: Mapping[str, Coefficients]
) -> FloatArray:
    """Predicted seconds of runs, with coefficients by site."""
    groups: dict[tuple[str, Transformer, Software], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row.cluster, row.model, row.software].append(index)
    predicted_s = np.empty(len(rows))
    for (site, model, software), group in groups.items():
        configs = ParallelConfigs.of(rows[index].config for index in group)
        cluster = _cluster([row for row in rows if row.cluster == site])
        figures = predict(model, configs, cluster, software, coefficients[site])
        predicted_s[group] = figures.step_s
    return predicted_s


def predict_memory(rows: Sequence[MeasuredRun], overheads: MemoryOverheads | None) -> FloatArray:
    """Predicted bytes on the fullest device of each run; overheads of its program if None."""
    return np.array(
        [
            max(stage_memory(row.model, row.config, row.software, overheads).peak_bytes)
            for row in rows
        ],
        dtype=np.float64,
    )


# ── calibration ──────────────────────────────────────────────────────────────────────────────────


def _site_names(tables: Mapping[str, Sequence[MeasuredRun]]) -> list[str]:
    return list(dict.fromkeys(row.cluster for rows in tables.values() for row in rows))


def calibrated_site(site: str, tables: Mapping[str, Sequence[MeasuredRun]]) -> CalibratedSite:
    """Fit a site's coefficients and memory overheads to its selected runs."""
    rows = [row for table in tables.values() for row in table if row.cluster == site]
    timed = calibration_rows([row for row in rows if row.step_s is not None])
    timed = timed if len(timed) >= MIN_RUNS else []
    weighed = calibration_rows(
        [row for row in rows if row.memory_bytes is not None and row.table not in FORMULA_TABLES]
    )
    weighed = weighed if len(weighed) >= MIN_WEIGHED else []
    return CalibratedSite(
        coefficients=calibrate(timed, _cluster(timed)) if timed else Coefficients(),
        overheads=fitted_overheads(weighed) if weighed else None,
        timed=frozenset((row.table, row.row) for row in timed),
        weighed=frozenset((row.table, row.row) for row in weighed),
    )


def fitted_overheads(rows: Sequence[MeasuredRun]) -> MemoryOverheads:
    """Fit memory overheads to runs with measured memory."""
    only_state = MemoryOverheads(constant_bytes=0.0, state_factor=1.0, activation_factor=0.0)
    state_bytes, activation_bytes = [], []
    for row in rows:
        whole = stage_memory(row.model, row.config, row.software, FORMULAS_ONLY)
        state = stage_memory(row.model, row.config, row.software, only_state)
        fullest = int(np.argmax(whole.peak_bytes))
        state_bytes.append(state.peak_bytes[fullest])
        activation_bytes.append(whole.peak_bytes[fullest] - state.peak_bytes[fullest])
    measured = [row.memory_bytes for row in rows if row.memory_bytes is not None]
    return fit_overheads(state_bytes, activation_bytes, measured, rows[0].software.overheads)


def _cluster(rows: Sequence[MeasuredRun]) -> Cluster:
    """Part of a site large enough for the largest of the runs."""
    return site_cluster(rows[0].cluster, max(row.config.num_devices for row in rows))


# ── scores ───────────────────────────────────────────────────────────────────────────────────────


def _table_result(
    name: str, rows: Sequence[MeasuredRun], sites: Mapping[str, CalibratedSite]
) -> TableResult:
    untouched = {site: Coefficients() for site in sites}
    plain = FORMULAS_ONLY if name in FORMULA_TABLES else None
    zero_shot = _part(rows, rows, untouched, plain)
    timed = [row for row in rows if (row.table, row.row) not in sites[row.cluster].timed]
    weighed = [row for row in rows if (row.table, row.row) not in sites[row.cluster].weighed]
    # A site without selected runs has no calibration that could be scored.
    fitted = {site: found.coefficients for site, found in sites.items() if found.timed}
    # All runs of a table are from one site.
    overheads = plain if name in FORMULA_TABLES else sites[rows[0].cluster].overheads
    calibrated = _part(timed, weighed, fitted, overheads)
    tolerance = tolerance_of(name)
    return TableResult(
        table=name,
        num_rows=len(rows),
        num_calibration_rows=len(rows) - len(timed),
        zero_shot=zero_shot,
        calibrated=calibrated,
        tolerance=tolerance,
        violations=tuple(
            [f"{name}, zero-shot: {text}" for text in tolerance.violations(zero_shot, False)]
            + [f"{name}, calibrated: {text}" for text in tolerance.violations(calibrated, True)]
        ),
    )


def _part(
    timed: Sequence[MeasuredRun],
    weighed: Sequence[MeasuredRun],
    coefficients: Mapping[str, Coefficients],
    overheads: MemoryOverheads | None,
) -> TableScores:
    ran = [row for row in timed if row.step_s is not None and row.cluster in coefficients]
    step, ranking = None, None
    if ran:
        predicted_s = predict_steps(ran, coefficients)
        measured_s = np.array([row.step_s for row in ran], dtype=np.float64)
        step = error_score(predicted_s / measured_s - 1.0)
        ranking = ranking_score(ran, predicted_s)
    memory, out_of_memory = _memory_scores(weighed, overheads)
    return TableScores(step=step, ranking=ranking, memory=memory, out_of_memory=out_of_memory)


def _memory_scores(
    rows: Sequence[MeasuredRun], overheads: MemoryOverheads | None
) -> tuple[ErrorScore | None, OutOfMemoryScore | None]:
    if not rows:
        return None, None
    known = [row for row in rows if row.memory_bytes is not None]
    measured = np.array([row.memory_bytes for row in known], dtype=np.float64)
    errors = predict_memory(known, overheads) / measured - 1.0
    capacity = np.array(
        [site_cluster(row.cluster, 8).devices[0].memory_bytes for row in rows], dtype=np.float64
    )
    needed = predict_memory(rows, overheads) / GIVEN_BACK
    # Computed memory belongs to no run, so it cannot cause a false alarm.
    ran = None if overheads is FORMULAS_ONLY else out_of_memory_score(rows, needed, capacity)
    return error_score(errors), ran
