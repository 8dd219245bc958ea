"""Parts of random convolutions whose answers are known, and times of their answers."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from hocket.classes.artefact import Folder, read_folder, write_folder
from hocket.classes.codes import cyclic_code
from hocket.classes.combine import OddsCalibration
from hocket.classes.exported import as_onnx
from hocket.classes.serving.front_end import FrontEnd
from hocket.classes.table import PartTable, ServedPart, Whole

SHAPE = (3, 32, 32)


class Known(nn.Module):
    """Scores that are known, after convolutions that only take time."""

    def __init__(self, width: int, depth: int, rows: torch.Tensor) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index in range(depth):
            stride = 2 if index in (depth // 3, 2 * depth // 3) else 1
            layers += [nn.Conv2d(3 if index == 0 else width, width, 3, stride, 1), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.scores = nn.Linear(64, len(rows), bias=False)
        self.scores.weight.data.copy_(rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x[:, 0, :8, :8].flatten(1)) + 1e-9 * self.body(x).mean()


def served(classes: tuple[int, ...], index: int) -> ServedPart:
    return ServedPart(classes=classes, calibration=OddsCalibration(), onnx=f"part-{index}.onnx",
                      macs=1, parameters=1, latency_s=1e-3)  # fmt: skip


def made_folder(path: Path, width: int, depth: int, parts: int, redundancy: int = 1) -> Folder:
    truth = torch.randn(parts, 64, generator=torch.Generator().manual_seed(0))
    groups = tuple((index,) for index in range(parts))
    held = cyclic_code(parts, redundancy)
    table_parts, files = [], {"whole.onnx": b"-"}
    for index, classes in enumerate(held):
        rows = torch.cat([torch.zeros(1, 64), truth[list(classes)]])
        model = as_onnx(Known(width, depth, rows), torch.zeros(1, *SHAPE))
        files[f"part-{index}.onnx"] = model
        table_parts.append(served(classes, index))
    names = tuple(map(str, range(max(parts, 2))))
    groups = groups if parts > 1 else ((0, 1),)
    if parts == 1:
        model = as_onnx(Known(width, depth, torch.zeros(3, 64)), torch.zeros(1, *SHAPE))
        files["part-0.onnx"] = model
        table_parts = [served((0, 1), 0)]
    table = PartTable(
        class_names=names,
        input_shape=SHAPE,
        input_dtype="float32",
        groups=groups,
        held=held,
        parts=tuple(table_parts),
        whole=Whole(onnx="whole.onnx", macs=1, parameters=1, latency_s=1, eager_s=1),
        redundancy=redundancy,
    )
    write_folder(path, table, files, {})
    return read_folder(path)


def times_s(
    front_end: FrontEnd, count: int, rest_s: float = 0.0, spell_s: float = 0.0
) -> np.ndarray:
    """Of so many answers at least, and for so long."""
    image = np.zeros(SHAPE, np.float32)
    for _ in range(20):
        front_end.predict(image)
    found: list[float] = []
    until_s = time.monotonic() + spell_s
    while len(found) < count or time.monotonic() < until_s:
        if rest_s:
            time.sleep(rest_s)
        found.append(front_end.predict(image).took_s)
    return np.array(found)


def quantiles(found: np.ndarray) -> dict[str, float]:
    low, middle, high = np.quantile(found, [0, 0.5, 0.99]) * 1e6
    return {"min_us": low, "p50_us": middle, "p99_us": high}
