"""Facts of parallel configurations and plans, computed once for text, report and ``--json``.

Columns of the candidates table, JSON of forecasts, facts per pipeline rank, and a Perfetto trace of
a pipeline schedule.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hocket.base.units import format_percent, format_seconds
from hocket.cost.parallel.softwares import DEFAULT_SOFTWARE
from hocket.plan.problem import Problem
from hocket.plan.sections import Section
from hocket.plan.training import TransformerTraining
from hocket.plan.transformer_plan import TransformerPlan
from hocket.planners.parallel.forecast import (
    ConfigForecast,
    GraphForecast,
    forecast_of,
    has_degrees,
    label,
)
from hocket.planners.parallel.pools import pools_of
from hocket.simulate.pipeline import action_name
from hocket.simulate.timeline import Timeline
from hocket.transformer import ParallelConfig
from hocket.view.names import inert
from hocket.view.table import Column, number
from hocket.view.wording import count_of, dollars, picked

if TYPE_CHECKING:
    from hocket.planners.candidates import Candidate, Comparison

HOURS_PER_DAY = 24


def fields_of(candidates: tuple[ConfigForecast, ...]) -> list[tuple[Column, tuple[str, ...]]]:
    """Columns of the candidates table, except memory, with their cells; empty columns are
    omitted."""
    configs = [candidate.config for candidate in candidates]

    def whole(name: str, *, skip: int = 0) -> tuple[str, ...]:
        numbers = [getattr(config, name) for config in configs]
        return tuple("" if set(numbers) == {skip} else str(number) for number in numbers)

    def texts(text: Any) -> tuple[str, ...]:
        return tuple(text(candidate) for candidate in candidates)

    columns = [
        (Column(title="strategy", rank=5), texts(lambda c: inert(c.name))),
        (Column(title="on", rank=4), kinds_text(candidates)),
        (number("tensor"), whole("tensor")),
        (number("pipe"), whole("pipeline")),
        (number("data"), whole("data")),
        (number("ctx", 2), whole("context", skip=1)),
        (number("expert", 3), whole("expert", skip=1)),
        (number("micro"), whole("microbatch")),
        (Column(title="schedule", rank=1),
         texts(lambda c: schedule_text(c.config))),
        (Column(title="recompute"), whole("recompute")),
        (number("ZeRO"), whole("zero")),
        (number("step"), texts(lambda c: format_seconds(c.step_s))),
        (number("tokens/s", 8), texts(lambda c: _number(c.tokens_per_s, "{:,.0f}"))),
        (number("MFU", 6), texts(lambda c: format_percent(c.mfu))),
        (number("bubble", 7), texts(lambda c: format_percent(c.bubble))),
        (number("exposed", 9), texts(lambda c: _number(c.exposed_share, "{:.0%}"))),
        (number("per day", 10), texts(price_text)),
    ]  # fmt: skip
    return [(column, cells) for column, cells in columns if set(cells) - {"", "–"}]


def _number(value: float | None, form: str) -> str:
    """Number as a cell; empty if it is unknown."""
    return "" if value is None else form.format(value)


def kinds_text(candidates: tuple[ConfigForecast, ...]) -> tuple[str, ...]:
    """Device types of each candidate, such as ``2 a100-80g + 4 v100-16g`` (pipeline ranks per
    type).

    Texts are empty if the cluster has one device type.
    """
    if not candidates or len(pools_of(candidates[0].problem)) == 1:
        return ("",) * len(candidates)
    texts = []
    for candidate in candidates:
        if isinstance(candidate, GraphForecast):
            texts.append(" + ".join(inert(kind) for kind in candidate.kinds))
            continue
        pairs = zip(candidate.stages.pools, candidate.stages.ranks, strict=True)
        names = [(pools_of(candidate.problem)[pool].kind.name, ranks) for pool, ranks in pairs]
        texts.append(" + ".join(f"{ranks} {inert(name)}" for name, ranks in names))
    return tuple(texts)


def schedule_text(config: ParallelConfig) -> str:
    """Schedule such as ``interleaved x4``; a dash without a pipeline."""
    if config.pipeline == 1:
        return "–"
    return inert(config.schedule) + (f" x{config.chunks}" if config.chunks > 1 else "")


def price_text(candidate: ConfigForecast) -> str:
    """Dollars per day; empty if prices are unknown."""
    hourly = candidate.price_per_hour
    return "" if hourly is None else dollars(hourly * HOURS_PER_DAY)


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────


def forecast_data(candidate: ConfigForecast) -> dict[str, Any]:
    """A candidate as data for ``--json``."""
    config = asdict(candidate.config)
    layers = config.pop("layers")
    found = picked(
        candidate, "num_devices", "step_s", "estimate_s", "tokens_per_s", "mfu", "causal_mfu",
        "bubble", "price_per_step", "price_per_hour", "simulated", "feasible", "reason",
    )  # fmt: skip
    return {
        "strategy": candidate.name or label(candidate.config),
        **config,
        "schedule": candidate.config.schedule,
        "layers": layers or None,
        "kinds": list(dict.fromkeys(candidate.kinds)),
        "num_microbatches": candidate.config.num_microbatches,
        "step_range_s": candidate.range_s,
        "peak_bytes": max(candidate.peak_bytes),
        "rank_peak_bytes": candidate.peak_bytes,
        "exposed": candidate.exposed_share,
        **found,
    }


def forecasts_data(comparison: Comparison, top: int) -> dict[str, Any]:
    """A comparison of configurations as data, with the candidates of `shown`."""
    problem, winner = comparison.problem, winning(comparison)
    return {
        "model": problem.work_name,
        "cluster": {"name": problem.cluster.name, "hash": problem.cluster.content_hash},
        "software": software_name(problem),
        **{f"num_{name}": count for name, count in comparison.counts.items()},
        "step_s": None if winner is None else winner.step_s,
        "chosen": None if winner is None else forecast_data(winner) | parts_data(winner),
        "candidates": [forecast_data(candidate) for candidate in shown(comparison, top)],
        "why": comparison.why,
    }


def software_name(problem: Problem) -> str:
    """Name of the predicted training program."""
    work = problem.work
    return work.software.name if isinstance(work, TransformerTraining) else DEFAULT_SOFTWARE


def parts_data(candidate: ConfigForecast) -> dict[str, Any]:
    """Parts of the step time."""
    return {"breakdown": {f"{name}_s": value for name, value in candidate.parts_s.items()}}


def shown(comparison: Comparison, top: int) -> tuple[ConfigForecast, ...]:
    """The first ``top`` candidates that fit, the chosen one first, and a few that do not fit."""
    candidates: list[Candidate] = list(comparison.candidates)
    if not isinstance(comparison.problem.work, TransformerTraining):
        candidates = _by_step(comparison)
    fitting = [c for c in candidates if c.feasible]
    others = [c for c in candidates if not c.feasible]
    num_others = min(len(others), max(top // 3, 1)) if fitting else top
    return tuple(forecast_of(comparison.problem, c) for c in (*fitting[:top], *others[:num_others]))


def _by_step(comparison: Comparison) -> list[Candidate]:
    """Candidates with parallel degrees, without duplicate plans: the chosen one, then by step
    time."""
    winner = comparison.winner
    found = {} if winner is None else {_sections(winner): winner}
    for candidate in sorted(comparison.candidates, key=lambda c: c.step_s or math.inf):
        if has_degrees(candidate):
            found.setdefault(_sections(candidate), candidate)
    return list(found.values())


def _sections(candidate: Candidate) -> tuple[Section, ...]:
    return () if candidate.plan is None else candidate.plan.sections


def winning(comparison: Comparison) -> ConfigForecast | None:
    """Forecast of the chosen configuration; None if nothing fits."""
    winner = comparison.winner
    return None if winner is None else forecast_of(comparison.problem, winner)


def counts_text(comparison: Comparison) -> str:
    """Counts such as ``1,234 configs, 56 fit, 7 simulated``; captured ops are always simulated."""
    counts = comparison.counts
    if "configs" not in counts:
        return f"{count_of(counts['simulated'], 'config')} simulated"
    return (
        f"{count_of(counts['configs'], 'config')}, {counts['fitting']:,} fit, "
        f"{counts['simulated']:,} simulated"
    )


# ── plans ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Devices, layers, load and memory of one pipeline rank."""

    rank: int
    kind: str
    num_devices: int
    price_per_hour: float
    """Hourly price of one device; 0 if unknown."""
    first_device: str
    stages: tuple[int, ...]
    num_layers: int
    busy_share: float
    state_bytes: int
    peak_bytes: int
    capacity_bytes: int


def rank_facts(plan: TransformerPlan, timeline: Timeline) -> list[RankFacts]:
    """Facts of each pipeline rank."""
    devices = {device.name: device for device in plan.cluster.devices}
    layers = plan.config.layers or (
        (plan.model.layers // plan.config.num_stages,) * plan.config.num_stages
    )
    step_s = timeline.makespan_s or 1.0
    found = []
    for rank, names in enumerate(plan.devices):
        devices_of = plan.schedule.device_of_stage.tolist()
        stages = tuple(stage for stage, device in enumerate(devices_of) if device == rank)
        found.append(
            RankFacts(
                rank=rank,
                kind=devices[names[0]].kind.name,
                num_devices=len(names),
                price_per_hour=devices[names[0]].kind.price_per_hour,
                first_device=names[0],
                stages=stages,
                num_layers=sum(layers[stage] for stage in stages),
                busy_share=float(timeline.busy_s[rank]) / step_s,
                state_bytes=plan.costs.state_bytes[rank],
                peak_bytes=int(timeline.peak_bytes[rank]),
                # The smallest device of a rank limits all, because they hold equal shards.
                capacity_bytes=min(devices[name].memory_bytes for name in names),
            )
        )
    return found


def plan_numbers(divided: TransformerPlan, timeline: Timeline) -> dict[str, float]:
    """Predicted numbers of a plan: parts of the step, MFU, tokens per second."""
    claims = divided.plan.claims
    numbers = {
        "mfu": divided.mfu,
        "tokens_per_s": divided.tokens_per_s,
        "bubble": timeline.idle_share,
        "estimate_s": claims.estimated_step_s,
        **{f"{name}_s": value for name, value in claims.parts_s.items()},
    }
    return {name: value for name, value in numbers.items() if value is not None}


def step_parts(divided: TransformerPlan) -> dict[str, float]:
    """Parts of the step time, largest first."""
    parts = [pair for pair in divided.plan.claims.parts_s.items() if pair[1] > 0]
    return dict(sorted(parts, key=lambda part: -part[1]))


def plan_data(divided: TransformerPlan, timeline: Timeline) -> dict[str, Any]:
    """A transformer plan as data for ``--json``."""
    cluster = divided.cluster
    return {
        "model": divided.model.name,
        "cluster": {"name": cluster.name, "hash": cluster.content_hash},
        "config": asdict(divided.config),
        "step_s": timeline.makespan_s,
        "predicted_step_s": divided.step_s,
        "bubble": timeline.idle_share,
        "peak_bytes": max(timeline.peak_bytes.tolist()),
        "ranks": [asdict(fact) for fact in rank_facts(divided, timeline)],
    }


def plan_trace(divided: TransformerPlan, timeline: Timeline) -> dict[str, Any]:
    """Trace of the actions of each pipeline rank, for Perfetto."""
    schedule, events = divided.schedule, list[dict[str, Any]]()
    for rank, names in enumerate(divided.devices):
        name = f"rank {rank} ({inert(names[0])})"
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": name}})
        for action in range(*schedule.start[rank : rank + 2].tolist()):
            start_s, end_s = float(timeline.op_start_s[action]), float(timeline.op_end_s[action])
            events.append({
                "name": action_name(schedule, action), "ph": "X", "pid": rank, "tid": 0,
                "ts": round(start_s * 1e6, 3), "dur": round((end_s - start_s) * 1e6, 3),
            })  # fmt: skip
    facts = {"step_s": timeline.makespan_s, "model": inert(divided.model.name)}
    return {"displayTimeUnit": "ms", "otherData": facts, "traceEvents": events}
