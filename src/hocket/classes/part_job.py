"""The training of one part: a job of its own, here or in another process.

``python -m hocket.classes.part_job WORK INDEX`` trains the part that ``WORK/cut-INDEX`` describes
and leaves it in ``WORK/part-INDEX``; jobs share nothing but that folder, so they run side by side,
on one machine or as jobs of a fleet.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from torch import nn

from hocket.base.errors import HocketError, InputFileError
from hocket.base.jsonfile import read_json
from hocket.classes.cut import PartCut, build_part
from hocket.classes.material import Material, Progress, prepared
from hocket.classes.settings import SplitRequest
from hocket.classes.sources import load_arrays, state_arrays
from hocket.classes.steps import Steps, key_of
from hocket.classes.training import train_part, train_parts

REQUEST = "request.json"


def part_key(material: Material, cut: PartCut) -> str:
    """A digest of all that a trained part depends on."""
    recipe = material.request.retraining.__dict__
    return key_of(material.digest, cut.classes, cut.kept, cut.omitted, recipe)


def trained_part(
    material: Material, steps: Steps, index: int, cut: PartCut, progress: Progress
) -> nn.Module:
    """A part, trained now or before."""
    part = build_part(material.net, material.structure, material.example, cut)
    key = part_key(material, cut)
    saved = steps.get(f"part-{index}", key)
    if saved is not None:
        load_arrays(part, saved.arrays)
        return part.eval()
    part = part.to(material.request.device)
    train_part(
        part,
        cut.classes,
        material.net,
        material.splits.train,
        material.request.retraining,
        material.splits.augment,
        lambda *far: progress(f"retrain part {index}", *far),
    )
    part = part.cpu().eval()
    steps.put(f"part-{index}", key, state_arrays(part))
    return part


def train_together(
    material: Material, steps: Steps, cuts: Mapping[int, PartCut], progress: Progress
) -> None:
    """Train parts in this process, side by side on the same batches, and keep them."""
    parts = [
        build_part(material.net, material.structure, material.example, cut).to(
            material.request.device
        )
        for cut in cuts.values()
    ]
    train_parts(
        parts,
        [cut.classes for cut in cuts.values()],
        material.net,
        material.splits.train,
        material.request.retraining,
        material.splits.augment,
        lambda *far: progress(f"retrain {len(parts)} parts", *far),
    )
    for (index, cut), part in zip(cuts.items(), parts, strict=True):
        steps.put(f"part-{index}", part_key(material, cut), state_arrays(part))


def save_cut(steps: Steps, index: int, cut: PartCut) -> None:
    """Describe a part to the process that trains it."""
    steps.put(f"cut-{index}", "", {"none": np.zeros(1)}, asdict(cut))


def load_cut(steps: Steps, index: int) -> PartCut:
    """Read the cut that `save_cut` described."""
    saved = steps.get(f"cut-{index}", "")
    if saved is None:
        raise InputFileError(
            f"describes no part {index}", hint="run hocket split again", where=str(steps.folder)
        )
    kept = tuple(tuple(each) for each in saved.info["kept"])
    return PartCut(tuple(saved.info["classes"]), kept, tuple(saved.info["omitted"]))


def run_job(folder: Path, index: int) -> None:
    """Train one part of a split that another process prepared."""
    steps = Steps(folder)
    data = read_json(folder / REQUEST)
    assert isinstance(data, dict)
    material = prepared(SplitRequest.from_data(data), steps, _silent)
    trained_part(material, steps, index, load_cut(steps, index), _print)


def _silent(what: str, done: int, total: int) -> None:
    pass


def _print(what: str, done: int, total: int) -> None:
    if done == total or done % 10 == 0:
        sys.stdout.write(f"{done} {total}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        run_job(Path(sys.argv[1]), int(sys.argv[2]))
    except HocketError as error:
        sys.exit(str(error))
