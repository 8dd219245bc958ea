"""One seed of a net that `cifar_gpu.py` splits: its weights, its parts, and what came out."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hocket.classes.artefact import write_folder
from hocket.classes.combine import Combiner, OddsCalibration, accuracy
from hocket.classes.cut import PartCut, build_part
from hocket.classes.exported import as_onnx
from hocket.classes.material import Material
from hocket.classes.sources import load_arrays, state_arrays
from hocket.classes.split import calibrated
from hocket.classes.structure import multiplications
from hocket.classes.table import PartTable, ServedPart, Whole
from hocket.classes.training import outputs_of
from hocket.classes.validation import lost_workers, paired_error

START_S = time.time()


def say(what: str) -> None:
    print(f"{time.time() - START_S:6.0f} s  {what}", flush=True)


@dataclass
class Seed:
    """One seed of a net, and what is known of it."""

    material: Material
    told: dict[str, Any]
    groups: Any = ()
    held: Any = ()
    classes: list[tuple[int, ...]] = field(default_factory=list)
    omitted: list[int] = field(default_factory=list)
    parts: list[torch.nn.Module] = field(default_factory=list)

    def take(self, cuts: list[PartCut]) -> None:
        """The parts that cuts describe."""
        material = self.material
        self.omitted = [len(each.omitted) for each in cuts]
        self.parts = [
            build_part(material.net, material.structure, material.example, each).to(
                material.request.device
            )
            for each in cuts
        ]


def splits_of(material: Material) -> list[tuple[str, Any]]:
    return [("validation", material.splits.validation), ("test", material.splits.test)]


def path_of(asked: argparse.Namespace, seed: int) -> Path:
    return asked.out / f"{asked.net}-{seed}"


def write(asked: argparse.Namespace, told: dict[str, Any], suffix: str = ".whole.json") -> None:
    given = {name: str(value) for name, value in vars(asked).items()}
    path = path_of(asked, told["seed"]).with_suffix(suffix)
    path.write_text(json.dumps({"arguments": given, **told}, default=float))


def load_whole(asked: argparse.Namespace, seed: int, net: torch.nn.Module) -> bool:
    """Put the weights of an earlier run into a net, if there are any."""
    path = asked.wholes / f"{asked.net}-{seed}.npz" if asked.wholes is not None else None
    if path is None or not path.is_file():
        return False
    with np.load(path, allow_pickle=False) as stored:
        load_arrays(net, {name: _wide(stored[name]) for name in stored.files})
    return True


def save_whole(asked: argparse.Namespace, seed: Seed) -> None:
    """Weights in half the width, for another run."""
    path = path_of(asked, seed.told["seed"]).with_suffix(".npz")
    halves = {name: each.astype(np.float16) if each.dtype == np.float32 else each
              for name, each in state_arrays(seed.material.net).items()}  # fmt: skip
    np.savez(path, **halves)


def _wide(each: np.ndarray) -> np.ndarray:
    return each.astype(np.float32) if each.dtype == np.float16 else each


def said_by(parts: list[torch.nn.Module], data: Any) -> list[np.ndarray]:
    found = [outputs_of(part, data.inputs).numpy().astype(float) for part in parts]
    for part in parts:
        part.cpu()
    return found


def combined(material: Material, classes: Any, outputs: list[np.ndarray]) -> Combiner:
    plain = Combiner(material.splits.num_classes, tuple(classes),
                     tuple(OddsCalibration() for _ in classes))  # fmt: skip
    return calibrated(plain, outputs, material.splits.validation.labels.cpu().numpy())


def judge(asked: argparse.Namespace, seed: Seed, outputs: dict[str, list[np.ndarray]]) -> None:
    """Calibrate, and try on test data."""
    material, told = seed.material, seed.told
    combiner = combined(material, seed.classes, outputs["validation"])
    whole = outputs_of(material.net, material.splits.test.inputs).numpy()
    labels = {name: data.labels.cpu().numpy() for name, data in splits_of(material)}
    scores = {name: combiner.scores(each) for name, each in outputs.items()}
    lost = lost_workers(combiner, outputs["test"], labels["test"], min(asked.redundancy, 3))
    told["parts"] |= {
        **{name: accuracy(scores[name], labels[name]) for name in scores},
        "lost_points": 100 * (told["whole"]["test"] - accuracy(scores["test"], labels["test"])),
        "paired_error_points": 100 * paired_error(whole, scores["test"], labels["test"]),
        "lost_workers": [vars(each) for each in lost],
        "groups": seed.groups, "held": seed.held, "classes": seed.classes,
        "work": [sum(multiplications(each, material.example).values()) / material.whole_macs
                 for each in seed.parts],
        "parameters": [sum(each.numel() for each in part.parameters()) for part in seed.parts],
        "omitted": seed.omitted,
        "calibrations": [vars(each) for each in combiner.calibrations],
        "doubt": combiner.doubt,
    }  # fmt: skip
    keep_outputs(asked, material, outputs, told["seed"])
    left_out = ("calibrations", "classes", "held", "lost_workers")
    seen = {key: value for key, value in told["parts"].items() if key not in left_out}
    say(f"parts {json.dumps(seen)}")


def keep_outputs(
    asked: argparse.Namespace, material: Material, outputs: dict[str, list[np.ndarray]], seed: int
) -> None:
    """What the net and its parts said, to try other ways to combine it."""
    arrays = {f"{name}_{index}": each.astype(np.float16)
              for name, found in outputs.items() for index, each in enumerate(found)}  # fmt: skip
    for name, data in splits_of(material):
        arrays[f"{name}_whole"] = outputs_of(material.net, data.inputs).numpy().astype(np.float16)
        arrays[f"{name}_labels"] = data.labels.cpu().numpy().astype(np.uint8)
    np.savez_compressed(path_of(asked, seed).with_suffix(".outputs.npz"), **arrays)


def save_folder(asked: argparse.Namespace, seed: Seed) -> None:
    """A folder that `cifar_latency.py` times and serves."""
    material, told = seed.material, seed.told
    found, files = told["parts"], {"whole.onnx": as_onnx(material.net, material.example)}
    rows = []
    for index, part in enumerate(seed.parts):
        files[f"part-{index}.onnx"] = as_onnx(part, material.example)
        calibration = OddsCalibration(**found["calibrations"][index])
        rows.append(
            ServedPart(
                classes=found["classes"][index],
                calibration=calibration,
                onnx=f"part-{index}.onnx",
                macs=found["work"][index] * material.whole_macs,
                parameters=found["parameters"][index],
                latency_s=0.0,
            )
        )
    whole = Whole(
        onnx="whole.onnx",
        macs=material.whole_macs,
        parameters=told["whole"]["parameters"],
        latency_s=0.0,
        eager_s=0.0,
    )
    table = PartTable(
        class_names=material.splits.names,
        input_shape=tuple(material.example.shape[1:]),
        input_dtype="float32",
        groups=found["groups"],
        held=found["held"],
        parts=tuple(rows),
        whole=whole,
        redundancy=asked.redundancy,
        doubt=found["doubt"],
    )
    write_folder(path_of(asked, told["seed"]), table, files, {})
    material.net.to(asked.device)
