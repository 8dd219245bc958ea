"""The whole way from a trained classifier to a folder of parts that answer together.

groups of classes -> widths within a latency -> cut -> retrain each part -> calibrate on validation
data -> give channels back while too much accuracy is lost -> folder. Every finished step is kept in
``FOLDER/work``, so that the same command goes on after an interruption.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from hocket.base.arrays import FloatArray
from hocket.base.atomic import write_atomically
from hocket.base.jsonfile import dump_json
from hocket.classes.artefact import Folder, write_folder
from hocket.classes.calibrate import calibrated
from hocket.classes.codes import cyclic_code, held_classes
from hocket.classes.combine import Combiner, OddsCalibration, accuracy
from hocket.classes.cut import PartCut
from hocket.classes.exported import as_exported, as_onnx
from hocket.classes.fit import Budgets, cut_to, fitted_budgets, whole_times
from hocket.classes.give_back import blame, larger_budgets
from hocket.classes.grouping import chosen_groups
from hocket.classes.groups import Groups
from hocket.classes.material import Material, Tell, prepared
from hocket.classes.outlook import FanOut, answer_s
from hocket.classes.part_job import REQUEST, part_key, save_cut, train_together, trained_part
from hocket.classes.serving.rehearsal import rehearsed
from hocket.classes.session import latency_s, open_session
from hocket.classes.settings import SplitRequest
from hocket.classes.steps import Steps
from hocket.classes.structure import multiplications
from hocket.classes.table import PartTable, ServedPart, Whole
from hocket.classes.training import outputs_of
from hocket.classes.validation import StageScore, Validation, validated


@dataclass(frozen=True, eq=False)
class ClassSplit:
    """A finished split."""

    folder: Path
    table: PartTable
    validation: Validation


@dataclass(frozen=True, eq=False)
class _Round:
    """Parts that were trained, calibrated and tried on validation data."""

    cuts: tuple[PartCut, ...]
    parts: tuple[nn.Module, ...]
    combiner: Combiner
    scores: FloatArray
    """Of the validation inputs."""
    accuracy: float
    models: tuple[bytes, ...]
    """The parts as ONNX files."""
    part_s: tuple[float, ...]
    """One input on one thread; measured once, so that all that is told agrees."""


TrainApart = Callable[[Path, Sequence[int], Tell], None]
"""Trains the parts with some indices, whose cuts stand in a folder, in processes elsewhere."""


def split(
    request: SplitRequest,
    folder: Path,
    *,
    train_apart: TrainApart | None = None,
    cores: int | None = None,
    tell: Tell,
) -> ClassSplit:
    """Carry out a request; ``cores`` are those of the machine that will serve (default: this).

    Parts are trained together in this process, unless ``train_apart`` does it. Where this machine
    will serve, its workers rehearse at the end; of another one only the number of cores is known.
    """
    is_here = cores is None
    cores = cores or len(os.sched_getaffinity(0))
    steps = Steps(folder / "work")
    write_atomically(steps.folder / REQUEST, dump_json(request.to_data()))
    material = prepared(request, steps, tell)
    whole = whole_times(material)
    groups = chosen_groups(material, whole, cores)
    held = cyclic_code(len(groups), request.redundancy)
    classes = held_classes(groups, held)
    budgets = fitted_budgets(material, whole, classes, tell)
    whole_scores = outputs_of(material.net, material.splits.validation.inputs).numpy()
    labels = material.splits.validation.labels.cpu().numpy()
    base = accuracy(whole_scores, labels)
    stages = [StageScore("whole net", base, whole.latency_s)]
    best, stages = _rounds(
        material, steps, classes, budgets, train_apart, tell, whole_scores, stages
    )
    # Timed again beside the parts: what disturbs a run only ever makes it longer.
    whole = whole.quicker(whole_times(material))
    stages = [replace(stages[0], slowest_s=whole.latency_s), *stages[1:]]
    table, files = _table(material, whole.latency_s, whole.eager_s, groups, held, best, tell)
    predicted_s = (
        rehearsed(Folder(folder, table, {}, best.models)).answer_s
        if is_here
        else answer_s([part.latency_s for part in table.parts], cores, FanOut())
    )
    validation = validated(
        material, table, best.parts, stages, cores, budgets.target_s, predicted_s
    )
    table = write_folder(folder, table, files, validation.to_data())
    return ClassSplit(folder, table, validation)


def _rounds(
    material: Material,
    steps: Steps,
    classes: Sequence[tuple[int, ...]],
    budgets: Budgets,
    train_apart: TrainApart | None,
    tell: Tell,
    whole_scores: FloatArray,
    stages: list[StageScore],
) -> tuple[_Round, list[StageScore]]:
    """Train, and give channels back until the accuracy holds; the best round there was."""
    request = material.request
    labels = material.splits.validation.labels.cpu().numpy()
    needed = stages[0].accuracy - request.accuracy_loss / 100
    macs: tuple[float, ...] | None = budgets.macs
    best: _Round | None = None
    for number in range(request.rounds + 1):
        if macs is None:
            break
        tell("rounds of training", number, request.rounds + 1)
        now = _round(material, steps, classes, macs, train_apart, tell)
        name = "parts, calibrated" if number == 0 else f"channels given back, round {number}"
        stages = [*stages, StageScore(name, now.accuracy, max(now.part_s))]
        if best is None or now.accuracy > best.accuracy:
            best = now
        if now.accuracy >= needed - 1e-12:
            break
        blamed = blame(now.combiner, now.scores, whole_scores, labels)
        macs = _budgets_that_change(material, now.cuts, macs, blamed)
    assert best is not None
    return best, stages


def _budgets_that_change(
    material: Material, cuts: Sequence[PartCut], macs: Sequence[float], blamed: FloatArray
) -> tuple[float, ...] | None:
    """Larger budgets with which some part has more channels; None where none can have.

    Below the floors of widths, and between two of them, a larger budget may change nothing.
    """
    larger = larger_budgets(macs, blamed, material.whole_macs)
    while larger is not None and all(
        cut_to(material, cut.classes, budget) == cut
        for cut, budget in zip(cuts, larger, strict=True)
    ):
        larger = larger_budgets(larger, blamed, material.whole_macs)
    return larger


def _round(
    material: Material,
    steps: Steps,
    classes: Sequence[tuple[int, ...]],
    macs: Sequence[float],
    train_apart: TrainApart | None,
    tell: Tell,
) -> _Round:
    cuts = tuple(cut_to(material, mine, budget) for mine, budget in zip(classes, macs, strict=True))
    missing = [
        index
        for index, cut in enumerate(cuts)
        if steps.get(f"part-{index}", part_key(material, cut)) is None
    ]
    if train_apart is not None and missing:
        for index in missing:
            save_cut(steps, index, cuts[index])
        train_apart(steps.folder, missing, tell)
    elif missing:
        train_together(material, steps, {index: cuts[index] for index in missing}, tell)
    parts = tuple(trained_part(material, steps, index, cut, tell) for index, cut in enumerate(cuts))
    validation = material.splits.validation
    outputs = [outputs_of(part, validation.inputs).numpy().astype(float) for part in parts]
    labels = validation.labels.cpu().numpy()
    plain = Combiner(
        material.splits.num_classes, tuple(classes), tuple(OddsCalibration() for _ in classes)
    )
    combiner = calibrated(plain, outputs, labels)
    scores = combiner.scores(outputs)
    models = tuple(as_onnx(part, material.example) for part in parts)
    part_s = tuple(latency_s(open_session(each), material.example.numpy()) for each in models)
    return _Round(cuts, parts, combiner, scores, accuracy(scores, labels), models, part_s)


def _table(
    material: Material,
    whole_s: float,
    eager_s: float,
    groups: Groups,
    held: tuple[tuple[int, ...], ...],
    done: _Round,
    tell: Tell,
) -> tuple[PartTable, dict[str, bytes]]:
    example = material.example
    files: dict[str, bytes] = {"whole.onnx": as_onnx(material.net, example)}
    material.net.to(material.request.device)
    parts = []
    for index, (net, cut, calibration) in enumerate(
        zip(done.parts, done.cuts, done.combiner.calibrations, strict=True)
    ):
        tell("write parts", index, len(done.parts))
        onnx, exported = f"part-{index}.onnx", f"part-{index}.pt2"
        files[onnx], files[exported] = done.models[index], as_exported(net, example)
        parts.append(
            ServedPart(
                cut.classes,
                calibration,
                onnx,
                exported,
                sum(multiplications(net, example).values()),
                _parameters(net),
                done.part_s[index],
            )
        )
    whole = Whole("whole.onnx", material.whole_macs, _parameters(material.net), whole_s, eager_s)
    table = PartTable(
        material.splits.names,
        tuple(example.shape[1:]),
        str(example.dtype).removeprefix("torch."),
        groups,
        held,
        tuple(parts),
        whole,
        material.request.redundancy,
        done.combiner.doubt,
    )
    return table, files


def _parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())
