"""The training of one part: a job of its own, here or in another process.

``python -m hocket.classes.part_job WORK INDEX`` trains the part that ``WORK/cut-INDEX`` describes
and leaves it in ``WORK/part-INDEX``; jobs share nothing but that folder, so they run side by side,
on one machine or as jobs of a fleet.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from torch import nn

from hocket.base.errors import HocketError, InputFileError
from hocket.base.jsonfile import read_json
from hocket.classes.cut import PartCut, build_part
from hocket.classes.material import Material, Tell, prepared
from hocket.classes.settings import SplitRequest
from hocket.classes.sources import load_arrays, state_arrays
from hocket.classes.steps import Steps, key_of
from hocket.classes.training import train_part

REQUEST = "request.json"


def part_key(material: Material, cut: PartCut) -> str:
    """A digest of all that a trained part depends on."""
    return key_of(material.digest, cut.classes, cut.kept, material.request.retraining.__dict__)


def trained_part(
    material: Material, steps: Steps, index: int, cut: PartCut, tell: Tell
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
        lambda *far: tell(f"retrain part {index}", *far),
    )
    part = part.cpu().eval()
    steps.put(f"part-{index}", key, state_arrays(part))
    return part


def save_cut(steps: Steps, index: int, cut: PartCut) -> None:
    """Describe a part to the process that trains it."""
    steps.put(f"cut-{index}", "", {"none": np.zeros(1)}, {"classes": cut.classes, "kept": cut.kept})


def load_cut(steps: Steps, index: int) -> PartCut:
    """What `save_cut` described."""
    saved = steps.get(f"cut-{index}", "")
    if saved is None:
        raise InputFileError(
            f"describes no part {index}", hint="run hocket split again", where=str(steps.folder)
        )
    kept = tuple(tuple(each) for each in saved.info["kept"])
    return PartCut(tuple(saved.info["classes"]), kept)


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
