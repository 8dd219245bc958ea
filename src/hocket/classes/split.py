"""Split a trained classifier into a folder of parts that answer together.

The steps are: group the classes -> choose widths for a latency -> cut -> retrain each part ->
calibrate on validation data -> restore channels while too much accuracy is lost -> write the
folder. Every finished step is stored in ``FOLDER/work``, so that the same command resumes after an
interruption.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
from torch import nn

from hocket.base.arrays import FloatArray, LongArray
from hocket.base.atomic import write_atomically
from hocket.base.errors import UsageError
from hocket.base.jsonfile import dump_json
from hocket.base.parts import even_parts
from hocket.classes.artefact import Folder, write_folder
from hocket.classes.codes import cyclic_code, held_classes
from hocket.classes.combine import Combiner, OddsCalibration, accuracy, log_odds, probabilities
from hocket.classes.cut import PartCut
from hocket.classes.exported import as_onnx
from hocket.classes.fit import (
    Budgets,
    WholeTimes,
    cut_to,
    fitted_budgets,
    group_work,
    part_latency_s,
    pruned_overlap,
    whole_times,
)
from hocket.classes.latency_forecast import FanOut, answer_s
from hocket.classes.material import Material, Progress, prepared
from hocket.classes.part_training import trained_parts
from hocket.classes.serving.dry_run import forecast_by_dry_run
from hocket.classes.session import latency_s, open_session
from hocket.classes.settings import ANY_NUMBER, SplitRequest
from hocket.classes.steps import Steps
from hocket.classes.structure import multiplications
from hocket.classes.table import PartTable, ServedPart, Whole
from hocket.classes.training import outputs_of
from hocket.classes.validation import StageScore, Validation, validated

# Grouping: balanced k-means on class embeddings, after Wang et al., "sensAI: ConvNets decomposition
# via class parallelism" (MLSys 2021). Similar classes need the same channels, so they are put
# together. Each round lets the classes with most to lose choose their nearest centre that has a
# free place. O(rounds · n · k).

Groups = tuple[tuple[int, ...], ...]
_ROUNDS = 300
_STARTS = 10


def even_sizes(num_classes: int, num_parts: int) -> tuple[int, ...]:
    """Number of classes of each part, as equal as possible."""
    if not 1 <= num_parts <= num_classes:
        raise UsageError(
            f"{num_classes} classes cannot be put into {num_parts} parts",
            hint=f"ask for 1 to {num_classes} parts",
        )
    return even_parts(num_classes, num_parts)


def balanced_groups(embeddings: FloatArray, sizes: tuple[int, ...], seed: int = 0) -> Groups:
    """Cluster classes by their embeddings into groups of the given sizes."""
    if sum(sizes) != len(embeddings):
        raise UsageError(f"sizes {sizes} do not add up to {len(embeddings)} classes")
    rng = np.random.default_rng(seed)
    found = [_clustered(embeddings, sizes, rng) for _ in range(_STARTS)]
    _, labels = min(found, key=lambda each: each[0])
    groups = [tuple(np.flatnonzero(labels == part).tolist()) for part in range(len(sizes))]
    return tuple(sorted(groups))


def _clustered(
    points: FloatArray, sizes: tuple[int, ...], rng: np.random.Generator
) -> tuple[float, LongArray]:
    centres = _spread(points, len(sizes), rng)
    labels = np.full(len(points), -1)
    for _ in range(_ROUNDS):
        far = np.linalg.norm(points[:, None] - centres[None], axis=2)
        now = _placed(far, sizes)
        if np.array_equal(now, labels):
            break
        labels = now
        centres = np.stack([points[labels == part].mean(axis=0) for part in range(len(sizes))])
    inertia = float(((points - centres[labels]) ** 2).sum())
    return inertia, labels


def _spread(points: FloatArray, count: int, rng: np.random.Generator) -> FloatArray:
    """Initial centres by k-means++: random, preferring points far from the other centres."""
    chosen = [int(rng.integers(len(points)))]
    while len(chosen) < count:
        gap = np.min(((points[:, None] - points[chosen][None]) ** 2).sum(axis=2), axis=1)
        gap[chosen] = 0.0
        total = gap.sum()
        # Classes with equal embeddings have no distance by which a centre could be drawn.
        free = np.setdiff1d(np.arange(len(points)), chosen)
        is_same = total <= 0
        chosen.append(int(rng.choice(free) if is_same else rng.choice(len(gap), p=gap / total)))
    return points[chosen].copy()


def _placed(far: FloatArray, sizes: tuple[int, ...]) -> LongArray:
    free = list(sizes)
    labels = np.zeros(len(far), dtype=np.int64)
    # Classes with most to lose choose first, while all places are free.
    for point in np.argsort(far.min(axis=1) - far.max(axis=1), kind="stable"):
        part = next(int(part) for part in np.argsort(far[point], kind="stable") if free[part])
        labels[point], free[part] = part, free[part] - 1
    return labels


# Calibration: parts are trained separately, so their confidences are not comparable. A scale and a
# shift per part are chosen to maximise the likelihood of the labels of the validation split under
# the combined scores (Platt scaling over all parts at once). The problem is convex for one copy per
# class. L-BFGS with the exact gradient: O(iterations · inputs · classes). The doubt of classes with
# missing answers is then the one with the most correct answers when one or two workers are lost.

_STRENGTH = 1e-3
"""Weight of the regularisation towards scale 1 and shift 0, needed for small validation splits."""
_DOUBTS = np.arange(11) / 10
_MOST_LOST = 2
_MOST_PATTERNS = 60
_MOST_INPUTS = 5_000
"""Maximum number of inputs for choosing a doubt, because each is scored for many loss patterns."""


def calibrated(combiner: Combiner, outputs: Sequence[FloatArray], labels: LongArray) -> Combiner:
    """Return the combiner with scales, shifts and a doubt fitted to ``labels``."""
    num_parts = len(outputs)
    odds = [log_odds(output) for output in outputs]
    copies = np.maximum(combiner.copies([True] * num_parts), 1)
    truth = np.eye(combiner.num_classes)[labels]

    def loss(values: FloatArray) -> tuple[float, FloatArray]:
        scales, shifts = values[:num_parts], values[num_parts:]
        now = replace(combiner, calibrations=_as_pairs(scales, shifts))
        scores = now.scores(outputs)
        shares = probabilities(scores)
        likely = np.log(np.maximum(shares[np.arange(len(labels)), labels], 1e-30)).mean()
        slope = (shares - truth) / copies / len(labels)
        gradient = np.zeros(2 * num_parts)
        for part, classes in enumerate(combiner.classes):
            mine = slope[:, list(classes)]
            gradient[part] = (mine * odds[part]).sum()
            gradient[num_parts + part] = mine.sum()
        pull = np.concatenate([scales - 1, shifts])
        return float(-likely + _STRENGTH * (pull**2).sum()), gradient + 2 * _STRENGTH * pull

    start = np.concatenate([np.ones(num_parts), np.zeros(num_parts)])
    # A scale near 0 would silence a part, and a negative one would invert it.
    bounds = [(0.05, 20.0)] * num_parts + [(-20.0, 20.0)] * num_parts
    from scipy.optimize import minimize

    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds)
    pairs = _as_pairs(found.x[:num_parts], found.x[num_parts:])
    found_pairs = replace(combiner, calibrations=pairs)
    return replace(found_pairs, doubt=best_doubt(found_pairs, outputs, labels))


def best_doubt(combiner: Combiner, outputs: Sequence[FloatArray], labels: LongArray) -> float:
    """Smallest doubt with the highest accuracy when a few workers are lost."""
    copies = combiner.copies([True] * len(outputs))
    patterns = [
        gone
        for lost in range(1, min(_MOST_LOST, int(copies.min()) - 1) + 1)
        for gone in combinations(range(len(outputs)), lost)
    ]
    if not patterns:
        return 0.0
    # Spread over the whole split, because inputs may be sorted by class.
    chosen = np.linspace(0, len(labels) - 1, min(len(labels), _MOST_INPUTS)).astype(int)
    few, truth = [each[chosen] for each in outputs], labels[chosen]
    right = np.zeros(len(_DOUBTS))
    for place in np.linspace(0, len(patterns) - 1, min(len(patterns), _MOST_PATTERNS)).astype(int):
        has_answered = [index not in patterns[place] for index in range(len(outputs))]
        means = replace(combiner, doubt=0.0).scores(
            [each if came else None for each, came in zip(few, has_answered, strict=True)]
        )
        share = combiner.copies(has_answered) / copies
        right += [accuracy(means * share**doubt, truth) for doubt in _DOUBTS]
    return float(_DOUBTS[right.argmax()])


def _as_pairs(scales: FloatArray, shifts: FloatArray) -> tuple[OddsCalibration, ...]:
    return tuple(
        OddsCalibration(float(scale), float(shift))
        for scale, shift in zip(scales, shifts, strict=True)
    )


# Choice of the number of parts and their classes.

_MOST_PARTS = 16
_CLEAR_GAIN = 0.97
"""More parts must reduce the predicted answer time to less than this fraction."""


def chosen_groups(material: Material, whole: WholeTimes, cores: int) -> Groups:
    """Group the classes, into as many groups as requested or as are predicted to be fastest."""
    request = material.request
    if request.parts != ANY_NUMBER:
        return _groups(material, request.parts)
    offers = [_groups(material, count) for count in _counts(material)]
    best = offers[0]
    best_s = _predicted_s(material, whole, best, cores)
    for offer in offers[1:]:
        now_s = _predicted_s(material, whole, offer, cores)
        if now_s < _CLEAR_GAIN * best_s:
            best, best_s = offer, now_s
    return best


def _counts(material: Material) -> range:
    # With as many copies as parts, every part would have all classes.
    least = material.request.redundancy + 1
    return range(least, max(least, min(material.splits.num_classes, _MOST_PARTS)) + 1)


def _groups(material: Material, count: int) -> Groups:
    sizes = even_sizes(material.splits.num_classes, count)
    return balanced_groups(material.scores.embeddings, sizes, material.request.seed)


def _predicted_s(material: Material, whole: WholeTimes, groups: Groups, cores: int) -> float:
    """Predicted answer time if every part has the work that its classes need.

    Time is assumed to be linear in work, between a small part and the unsplit net.
    """
    work_of = group_work(material)
    classes = held_classes(groups, cyclic_code(len(groups), material.request.redundancy))
    small = part_latency_s(material, cut_to(material, classes[0], 0.1 * material.whole_macs))
    slope_s = max(whole.latency_s - small, 0.0) / 0.9
    part_s = [small + slope_s * (work_of(mine) / material.whole_macs - 0.1) for mine in classes]
    return answer_s(part_s, cores, FanOut())


# Restoring channels: an input that the unsplit net classifies correctly and the parts do not counts
# against the parts of its class and of the predicted class. Parts with most of these errors get a
# larger budget and are trained again; the others are unchanged. O(inputs · parts).

_MORE = 1.4
"""Factor on the budget of a part whose channels are restored."""


def newly_wrong_answers(
    combiner: Combiner, scores: FloatArray, whole_scores: FloatArray, labels: LongArray
) -> FloatArray:
    """Number of new errors that involve each part.

    A new error is an input that the unsplit net classifies correctly and the parts do not. It
    involves the parts that hold the true class or the predicted class.
    """
    said = scores.argmax(axis=1)
    is_new = (said != labels) & (whole_scores.argmax(axis=1) == labels)
    counts = np.zeros(len(combiner.classes))
    for part, classes in enumerate(combiner.classes):
        mine = np.isin(labels[is_new], classes).astype(float) + np.isin(said[is_new], classes)
        counts[part] = mine.sum()
    return counts


def larger_budgets(
    budgets: Sequence[float], newly_wrong: FloatArray, whole_macs: float
) -> tuple[float, ...] | None:
    """Budgets for the next round; None if no part with new errors can grow."""
    can_grow = np.array([budget < whole_macs for budget in budgets])
    held = np.where(can_grow, newly_wrong, 0.0)
    if held.max(initial=0.0) <= 0:
        return None
    grows = held >= max(1.0, held.max() / 2)
    return tuple(
        min(budget * _MORE, whole_macs) if grow else budget
        for budget, grow in zip(budgets, grows, strict=True)
    )


@dataclass(frozen=True, eq=False)
class ClassSplit:
    """A finished split: its folder, table and validation."""

    folder: Path
    table: PartTable
    validation: Validation


@dataclass(frozen=True, eq=False)
class _Round:
    """Parts that were trained, calibrated and evaluated on validation data."""

    cuts: tuple[PartCut, ...]
    parts: tuple[nn.Module, ...]
    combiner: Combiner
    scores: FloatArray
    """Combined scores of the validation inputs."""
    accuracy: float
    models: tuple[bytes, ...]
    """The parts as ONNX files."""
    part_s: tuple[float, ...]
    """Time of each part for one input on one thread; measured once, so that all figures agree."""


def split(
    request: SplitRequest,
    folder: Path,
    *,
    cores: int | None = None,
    progress: Progress,
) -> ClassSplit:
    """Split a net as requested and write the folder.

    ``cores`` is the number of cores of the machine that will serve; None for this machine. On this
    machine, the answer time is measured by a dry run of the workers; for another one it is
    predicted from the number of cores.
    """
    # Only the machine that will serve can be measured.
    is_here = cores is None
    cores = cores or len(os.sched_getaffinity(0))
    steps = Steps(folder / "work")
    write_atomically(steps.folder / "request.json", dump_json(asdict(request)))
    material = prepared(request, steps, progress)
    whole = whole_times(material)
    groups = chosen_groups(material, whole, cores)
    held = cyclic_code(len(groups), request.redundancy)
    classes = held_classes(groups, held)
    budgets = fitted_budgets(material, whole, classes, progress)
    whole_scores = outputs_of(material.net, material.splits.validation.inputs).numpy()
    labels = material.splits.validation.labels.cpu().numpy()
    base = accuracy(whole_scores, labels)
    stages = [StageScore("whole net", base, whole.latency_s)]
    best, stages = _rounds(material, steps, classes, budgets, progress, whole_scores, stages)
    # Measured again next to the parts, because disturbances only make a run longer.
    whole = whole.quicker(whole_times(material))
    stages = [replace(stages[0], slowest_s=whole.latency_s), *stages[1:]]
    table, files = _table(material, whole.latency_s, whole.eager_s, groups, held, best, progress)
    predicted_s = (
        forecast_by_dry_run(Folder(folder, table, {}, best.models)).answer_s
        if is_here
        else answer_s([part.latency_s for part in table.parts], cores, FanOut())
    )
    overlap = pruned_overlap(material, float(np.mean(budgets.macs)))
    validation = validated(
        material, table, best.parts, stages, cores, budgets.target_s, predicted_s, overlap
    )
    table = write_folder(folder, table, files, validation.to_data())
    return ClassSplit(folder, table, validation)


def _rounds(
    material: Material,
    steps: Steps,
    classes: Sequence[tuple[int, ...]],
    budgets: Budgets,
    progress: Progress,
    whole_scores: FloatArray,
    stages: list[StageScore],
) -> tuple[_Round, list[StageScore]]:
    """Train parts, restoring channels until the accuracy suffices; return the best round."""
    request = material.request
    labels = material.splits.validation.labels.cpu().numpy()
    needed = stages[0].accuracy - request.accuracy_loss / 100
    macs: tuple[float, ...] | None = budgets.macs
    best: _Round | None = None
    for number in range(request.rounds + 1):
        if macs is None:
            break
        progress("rounds of training", number, request.rounds + 1)
        now = _round(material, steps, classes, macs, progress)
        name = "parts, calibrated" if number == 0 else f"channels given back, round {number}"
        stages = [*stages, StageScore(name, now.accuracy, max(now.part_s))]
        if best is None or now.accuracy > best.accuracy:
            best = now
        if now.accuracy >= needed - 1e-12:
            break
        # Thresholds decide what is pruned, so there is no budget to raise.
        if request.hybrid is not None:
            break
        newly_wrong = newly_wrong_answers(now.combiner, now.scores, whole_scores, labels)
        macs = _budgets_that_change(material, now.cuts, macs, newly_wrong)
    assert best is not None
    return best, stages


def _budgets_that_change(
    material: Material, cuts: Sequence[PartCut], macs: Sequence[float], newly_wrong: FloatArray
) -> tuple[float, ...] | None:
    """Larger budgets with which some part keeps more channels; None if there are none.

    A slightly larger budget may change nothing, because widths have floors and change in steps.
    """
    larger = larger_budgets(macs, newly_wrong, material.whole_macs)
    while larger is not None and all(
        cut_to(material, cut.classes, budget) == cut
        for cut, budget in zip(cuts, larger, strict=True)
    ):
        larger = larger_budgets(larger, newly_wrong, material.whole_macs)
    return larger


def _round(
    material: Material,
    steps: Steps,
    classes: Sequence[tuple[int, ...]],
    macs: Sequence[float],
    progress: Progress,
) -> _Round:
    cuts = tuple(cut_to(material, mine, budget) for mine, budget in zip(classes, macs, strict=True))
    parts = trained_parts(material, steps, cuts, progress)
    validation = material.splits.validation
    outputs = [outputs_of(part, validation.inputs).numpy().astype(float) for part in parts]
    labels = validation.labels.cpu().numpy()
    plain = Combiner(
        material.splits.num_classes, tuple(classes), tuple(OddsCalibration() for _ in classes)
    )
    combiner = calibrated(plain, outputs, labels)
    scores = combiner.scores(outputs)
    models = tuple(as_onnx(part, material.example) for part in parts)
    # Measured once, so that table, stages and report state the same times.
    part_s = tuple(latency_s(open_session(each), material.example.numpy()) for each in models)
    return _Round(cuts, parts, combiner, scores, accuracy(scores, labels), models, part_s)


def _table(
    material: Material,
    whole_s: float,
    eager_s: float,
    groups: Groups,
    held: tuple[tuple[int, ...], ...],
    done: _Round,
    progress: Progress,
) -> tuple[PartTable, dict[str, bytes]]:
    example = material.example
    files: dict[str, bytes] = {"whole.onnx": as_onnx(material.net, example)}
    # The export has moved the net to the CPU.
    material.net.to(material.request.device)
    parts = []
    for index, (net, cut, calibration) in enumerate(
        zip(done.parts, done.cuts, done.combiner.calibrations, strict=True)
    ):
        progress("write parts", index, len(done.parts))
        onnx = f"part-{index}.onnx"
        files[onnx] = done.models[index]
        parts.append(
            ServedPart(
                classes=cut.classes,
                calibration=calibration,
                onnx=onnx,
                macs=sum(multiplications(net, example).values()),
                parameters=_parameters(net),
                latency_s=done.part_s[index],
            )
        )
    whole = Whole(
        onnx="whole.onnx",
        macs=material.whole_macs,
        parameters=_parameters(material.net),
        latency_s=whole_s,
        eager_s=eager_s,
    )
    table = PartTable(
        class_names=material.splits.names,
        input_shape=tuple(example.shape[1:]),
        input_dtype=str(example.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        groups=groups,
        held=held,
        parts=tuple(parts),
        whole=whole,
        redundancy=material.request.redundancy,
        doubt=done.combiner.doubt,
    )
    return table, files


def _parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())
