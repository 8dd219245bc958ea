"""Comparisons of candidates: the table of ``hocket plan``, its JSON, and hints at other commands.

Also describes the layers of each device, the limit of each candidate, and the effect of a batch
split on numerics.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from hocket.base.units import format_bytes, format_count, format_percent, format_seconds
from hocket.graph.graph import Graph, Phase
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel
from hocket.plan.training import TransformerTraining
from hocket.planners.goal import dollars_per_million, num_devices, samples_per_s
from hocket.planners.memory.blocks import layer_label
from hocket.simulate.analysis import used_devices
from hocket.simulate.parallel.tensor_parallel import degrees_of
from hocket.simulate.timeline import Timeline, covered_s
from hocket.view.facts import fullest_device
from hocket.view.names import LONGEST_SENTENCE, inert
from hocket.view.plan_view import device_names, device_peaks
from hocket.view.table import Column, FittedTable, name, number
from hocket.view.wording import dollars, of_capacity

if TYPE_CHECKING:
    from hocket.planners.candidates import Candidate, Comparison

_NORM = "batch_norm"
_MOST_LINES = 12
"""Maximum number of lines in the map of layers."""
MOST_CONFIGS = 10
BUSY = 0.67
"""Fraction of device time in compute from which a candidate is called limited by compute."""
FEW_DEVICES = 8
"""Largest number of equal devices for which data parallelism seldom loses to tensor parallelism."""


# ── text ──


def comparison_table(comparison: Comparison) -> RenderableType:
    """The chosen strategy, a table of all candidates, the reason for the choice and the lower
    bound.
    """
    # Every dash in the table is explained: by ✗ in its line, or by a sentence if memory is not the
    # reason.
    notes = [
        Text(f"{inert(c.planner)}: {inert(c.reason, LONGEST_SENTENCE)}", style="dim")
        for c in comparison.candidates
        if not c.feasible and c.reason and not lacks_memory(comparison.problem, c)
    ]
    table = candidates_table(comparison)
    return Group(*_headline(comparison), *_map(comparison), table, *notes, *_why(comparison))


def candidates_table(comparison: Comparison) -> FittedTable:
    """Table of candidates: step, samples per second, money and memory; ✔ marks the chosen one."""
    columns = (
        Column(title=""), name("strategy"), number("busiest"), number("step"),
        Column(title="limited by", rank=1), number("samples/s", 3), number("$ per M samples", 2),
        name("fullest", 4), number("peak memory  "), number("devices", 5),
    )  # fmt: skip
    return FittedTable(
        columns=columns,
        rows=[_cells(comparison, candidate) for candidate in comparison.candidates],
        styles=[_style(comparison, candidate) for candidate in comparison.candidates],
    ).without_empty()


def _cells(comparison: Comparison, candidate: Candidate) -> list[str]:
    problem, step_s, timeline = comparison.problem, candidate.step_s, candidate.timeline
    least_s, cells = comparison.least_step_s, [""] * 10
    cells[:2] = ["✔" if candidate is comparison.winner else "", inert(candidate.planner)]
    if candidate.max_load_s is not None:
        cells[2] = format_seconds(candidate.max_load_s, least_s)
    cells[3] = format_seconds(step_s, least_s) if step_s is not None else "–"
    if step_s and problem.graph.other_batch is not None:
        cells[5] = format_count(samples_per_s(problem, step_s))
    cells[6] = money_text(problem, candidate)
    if timeline is not None:
        worst = fullest_device(problem, timeline)
        peak, capacity = int(timeline.peak_bytes[worst]), int(problem.memory_bytes[worst])
        cells[4] = limited_by(timeline)
        cells[7] = inert(problem.cluster.device_names[worst])
        cells[8] = of_capacity(peak, capacity) + (" ✗" if peak > capacity else "  ")
        cells[9] = str(len(used_devices(timeline)))
    return cells


def limited_by(timeline: Timeline) -> str:
    """Largest loss of device time, averaged over the devices in use, such as ``idle 57 %``.

    Returns ``compute`` if devices compute for most of the step. Otherwise it is the larger of
    ``sending`` (copies and collectives that no compute hides) and ``idle``.
    """
    used = used_devices(timeline)
    whole_s = len(used) * timeline.makespan_s
    if whole_s <= 0:
        return ""
    spans = timeline.op_device, timeline.op_start_s, timeline.op_end_s
    active_s = covered_s(*spans, timeline.num_devices)[used].sum()
    compute_s = timeline.busy_s[used].sum()
    if compute_s > BUSY * whole_s:
        return f"compute {format_percent(compute_s / whole_s)}"
    sending_s, idle_s = active_s - compute_s, whole_s - active_s
    lost_s, cause = max((sending_s, "sending"), (idle_s, "idle"))
    return f"{cause} {format_percent(lost_s / whole_s)}"


def _style(comparison: Comparison, candidate: Candidate) -> str:
    return "bold" if candidate is comparison.winner else "" if candidate.feasible else "dim"


def lacks_memory(problem: Problem, candidate: Candidate) -> bool:
    """True if the simulated peak of a device exceeds its memory."""
    timeline = candidate.timeline
    return timeline is not None and bool((timeline.peak_bytes > problem.memory_bytes).any())


def _headline(comparison: Comparison) -> list[Text]:
    winner = comparison.winner
    if winner is None or winner.step_s is None or not compares_strategies(comparison):
        return []
    how = inert(how_of(winner), LONGEST_SENTENCE)
    return [Text(f"{how}: {format_seconds(winner.step_s)} per step", style="bold")]


def _split_of(comparison: Comparison) -> Parallel | None:
    """Batch split of the winner; None if the winner does not split the batch."""
    winner = comparison.winner
    return None if winner is None or winner.plan is None else winner.plan.get(Parallel)


def _map(comparison: Comparison) -> list[Text]:
    """Lines with the layers of each device; empty if all devices have the same layers and
    policy."""
    split = _split_of(comparison)
    if split is None:
        return []
    lines = layer_lines(comparison.problem.graph, split)
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"… {len(lines) - _MOST_LINES} more"]
    return [Text(inert(line), style="dim") for line in lines]


def _why(comparison: Comparison) -> list[Text]:
    """The reason for the choice, the lower bound, and the effect of a batch split on numerics."""
    # If nothing fits, the error message contains the reason.
    lines = [] if comparison.winner is None else [Text(inert(comparison.why, LONGEST_SENTENCE))]
    if comparison.bound is not None and comparison.gap is not None:
        bound, source = format_seconds(comparison.bound.seconds), inert(comparison.bound.why)
        is_step = comparison.problem.objective == "latency"
        what = "lower bound over all strategies" if is_step else "lower bound of the largest load"
        note = f"{what}: {bound} ({source})"
        if not compares_strategies(comparison):
            note += f", gap {format_percent(comparison.gap)}"
        lines.append(Text(note, style="dim"))
    split = _split_of(comparison)
    if split is not None:
        kept = kept_training(comparison.problem.graph, split)
        lines += [Text(inert(line, LONGEST_SENTENCE), style="dim") for line in kept]
    return lines


def layer_lines(graph: Graph, shares: Parallel) -> list[str]:
    """Lines such as ``v100: transformer.wte to transformer.h.5``, with the recomputed layers."""
    lines: list[str] = []
    for replica in shares.replicas:
        bounds = (0, *replica.cuts, int((graph.op_phase == Phase.FORWARD).sum()))
        for stage, (first, stop) in enumerate(pairwise(bounds)):
            own = replica.devices[stage * shares.tensor : (stage + 1) * shares.tensor]
            again = [block for block in replica.recomputed if first <= block[0] < stop]
            notes = f", {_layers(graph, again[0][0], again[-1][1])} recomputed" if again else ""
            if replica.cuts or notes:
                lines.append(f"{' + '.join(own)}: {_layers(graph, first, stop)}{notes}")
    return lines


def _layers(graph: Graph, first: int, stop: int) -> str:
    """First and last module of a range of forward ops, such as ``h.0 to h.5``."""
    paths = [path for op in range(first, stop) if (path := graph.module_of(op))]
    names = [layer_label(path) or path for path in (paths[:1] + paths[-1:])]
    if not names:
        return f"ops {first} to {stop - 1}"
    return names[0] if names[0] == names[-1] else f"{names[0]} to {names[-1]}"


def how_of(candidate: Candidate) -> str:
    """Description of a candidate's strategy; the planner's name if the plan has none."""
    notes = {} if candidate.plan is None else candidate.plan.notes
    return notes.get("how", candidate.planner)


def kept_training(graph: Graph, shares: Parallel) -> list[str]:
    """Notes on the numerical check of a batch split, and on its effect on batch norm and
    dropout."""
    is_split = len(shares.replicas) > 1 or len(shares.replicas[0].microbatches) > 1
    if not is_split:
        return []
    notes = []
    samples = graph.meta.get("samples")
    if isinstance(samples, str):
        notes.append(
            f"numerics: same as single-GPU training with batch {shares.num_samples}: {samples}"
        )
    if num_norms := _num_norms(graph):
        notes.append(f"{num_norms} batch norm{'s' * (num_norms > 1)} see {_seen(shares)}")
    if (graph.rng_order >= 0).any():
        notes.append("dropout masks differ from a single-GPU run")
    return notes


def _seen(shares: Parallel) -> str:
    """Describe the samples over which a batch norm computes its mean."""
    sizes = sorted({size for r in shares.replicas for size in r.microbatches}, reverse=True)
    each = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} or {sizes[-1]}"
    if len(sizes) > 2:
        each = f"{sizes[-1]} to {sizes[0]}"
    is_whole = all(len(replica.microbatches) == 1 for replica in shares.replicas)
    if is_whole and not shares.is_staged:
        return (
            f"all {shares.num_samples} samples with hocket launch, by sums over devices; with "
            f"hocket run the {each} of their own device"
        )
    return f"{each} samples at a time, as where gradients are accumulated"


def _num_norms(graph: Graph) -> int:
    kinds = [index for index, kind in enumerate(graph.kinds) if _NORM in kind]
    is_forward = graph.op_phase == Phase.FORWARD
    return int((np.isin(graph.op_kind, kinds) & is_forward).sum())


# ── JSON ──


def money_text(problem: Problem, candidate: Candidate) -> str:
    """Price of a million samples as a table cell; empty if the price is unknown."""
    price = dollars_per_million(problem, candidate)
    return "" if price is None else dollars(price)


def compares_strategies(comparison: Comparison) -> bool:
    """True if strategies for the batch were compared, false if only placements were."""
    return "ways" in comparison.counts


def sharing(comparison: Comparison, candidate: Candidate) -> dict[str, Any]:
    """Additional JSON of a candidate where strategies were compared: description, rate and
    price."""
    if not compares_strategies(comparison):
        return {}
    step_s, problem = candidate.step_s, comparison.problem
    return {
        "how": how_of(candidate),
        "samples_per_s": None if not step_s else samples_per_s(problem, step_s),
        "dollars_per_million_samples": dollars_per_million(problem, candidate),
    }


def placing(comparison: Comparison, winner: Candidate) -> dict[str, Any]:
    """JSON of the winner's placement with its transferred bytes, or of its batch split."""
    assert winner.plan is not None, "a winner has a plan"
    shares, problem = winner.plan.get(Parallel), comparison.problem
    if shares is not None:
        kept = kept_training(problem.graph, shares)
        return {"parallel": shares.to_data(), "training": kept}
    assert winner.timeline is not None, "a placement was simulated"
    sent = problem.graph.tensor_bytes[winner.timeline.transfer_tensor]
    return {
        "placement": device_names(problem, winner.plan),
        "cut_bytes": int(sent.sum()),
    }


def comparison_data(comparison: Comparison, most_configs: int = MOST_CONFIGS) -> dict[str, Any]:
    """Candidates and the winner as JSON, with at most ``most_configs`` parallel configurations."""
    if isinstance(comparison.problem.work, TransformerTraining):
        from hocket.view.parallel import forecasts_data

        data = forecasts_data(comparison, most_configs)
        return data | {"answered_by": answered_by(comparison), "elsewhere": elsewhere(comparison)}
    data = _inputs(comparison) | _compared(comparison) | _bound(comparison) | _won(comparison)
    return data | {"answered_by": answered_by(comparison), "elsewhere": elsewhere(comparison)}


def answered_by(comparison: Comparison) -> str:
    """Name the method behind the step times: simulation of captured ops, or a program's closed
    form.
    """
    work = comparison.problem.work
    if not isinstance(work, TransformerTraining):
        return "simulation of the captured ops"
    source = work.coefficients.source
    fitted = f", fitted to {source}" if source else ""
    return f"closed form of {work.software.name}{fitted}, pipelines simulated"


def alternatives_text(comparison: Comparison) -> str:
    """Step time and largest peak of every other candidate as text, for the notes of the chosen
    plan.
    """
    problem = comparison.problem
    found = []
    for candidate in comparison.candidates[: MOST_CONFIGS + 1]:
        if candidate is comparison.winner:
            continue
        if candidate.step_s is None:
            found.append(f"{candidate.planner} does not fit" if lacks_memory(problem, candidate)
                         else f"{candidate.planner} not possible")  # fmt: skip
            continue
        peak = ""
        if candidate.timeline is not None:
            peak = f" ({format_bytes(int(candidate.timeline.peak_bytes.max()))})"
        found.append(f"{candidate.planner} {format_seconds(candidate.step_s)}{peak}")
    return ", ".join(found)


def elsewhere(comparison: Comparison) -> str:
    """Hint at another command that could find a better plan; empty if there is none."""
    problem = comparison.problem
    if isinstance(problem.work, TransformerTraining):
        if len(problem.cluster.kinds) == 1:
            return ""
        return (
            "these devices are unequal: hocket plan MODEL also gives each as many samples as it is "
            "fast, which configs do not"
        )
    fits_few = comparison.winner is not None and problem.cluster.num_devices <= FEW_DEVICES
    # degrees_of is empty unless layers have matrices that can be split, as those of transformers.
    if fits_few or not degrees_of(problem.graph):
        return ""
    return (
        "for a transformer on many devices hocket parallel MODEL --software NAME also splits "
        "single ops and sequences over devices, and knows more schedules of pipelines"
    )


def _inputs(comparison: Comparison) -> dict[str, Any]:
    graph, cluster = comparison.problem.graph, comparison.problem.cluster
    return {
        "graph": {"name": graph.name, "ops": graph.num_ops, "hash": graph.content_hash},
        "cluster": {"name": cluster.name, "hash": cluster.content_hash},
        "costs": comparison.problem.costs.sources(),
    }


def _compared(comparison: Comparison) -> dict[str, Any]:
    winner = comparison.winner
    return {
        "candidates": [_candidate(comparison, c) for c in comparison.candidates],
        "chosen": winner.planner if winner else None,
        "why": comparison.why,
    }


def _candidate(comparison: Comparison, candidate: Candidate) -> dict[str, Any]:
    timeline = candidate.timeline
    data = {
        "planner": candidate.planner,
        "feasible": candidate.feasible,
        "step_s": candidate.step_s,
        "peak_bytes": {} if timeline is None else device_peaks(comparison.problem, timeline),
        "devices": num_devices(candidate),
        "reason": candidate.reason,
        "plan_seconds": candidate.plan_seconds,
    }
    return data | _load(candidate) | sharing(comparison, candidate)


def _bound(comparison: Comparison) -> dict[str, Any]:
    if comparison.bound is None:
        return {}
    return {
        "lower_bound_s": comparison.bound.seconds,
        "lower_bound_from": comparison.bound.why,
    }


def _won(comparison: Comparison) -> dict[str, Any]:
    winner = comparison.winner
    if winner is None or winner.plan is None or winner.timeline is None:
        return {}
    data = {
        "planner": winner.planner,
        "step_s": winner.step_s,
        "gap": comparison.gap,
        "peak_bytes": device_peaks(comparison.problem, winner.timeline),
        "plan_seconds": winner.plan_seconds,
        "notes": {**winner.plan.claims.summary(), **winner.plan.notes},
    }
    return data | _load(winner) | sharing(comparison, winner) | placing(comparison, winner)


def _load(candidate: Candidate) -> dict[str, float]:
    return {} if candidate.max_load_s is None else {"max_load": candidate.max_load_s}
