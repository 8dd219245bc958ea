"""A folder of parts that is made in a second: no training, no cutting."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from hocket.classes.artefact import Folder, read_folder, write_folder
from hocket.classes.codes import cyclic_code
from hocket.classes.combine import OddsCalibration
from hocket.classes.exported import as_onnx
from hocket.classes.table import PartTable, ServedPart, Whole

SHAPE = (1, 4, 4)
NUM_CLASSES = 6


def truth() -> torch.Tensor:
    """What each class scores for an input: a part says these, and 0 for others."""
    return torch.randn(NUM_CLASSES, 16, generator=torch.Generator().manual_seed(1))


def whole_scores(inputs: np.ndarray) -> np.ndarray:
    return inputs.reshape(-1, 16) @ truth().numpy().T


def small_folder(path: Path, num_parts: int = 3, redundancy: int = 2) -> Folder:
    groups = tuple(
        tuple(each.tolist()) for each in np.array_split(np.arange(NUM_CLASSES), num_parts)
    )
    held = cyclic_code(num_parts, redundancy)
    parts, files = [], {"whole.onnx": b"whole"}
    for index, mine in enumerate(held):
        classes = tuple(sorted(each for group in mine for each in groups[group]))
        net = nn.Sequential(nn.Flatten(), nn.Linear(16, 1 + len(classes)))
        with torch.no_grad():
            net[1].weight.copy_(torch.cat([torch.zeros(1, 16), truth()[list(classes)]]))
            net[1].bias.zero_()
        files[f"part-{index}.onnx"] = as_onnx(net, torch.zeros(1, *SHAPE))
        parts.append(
            ServedPart(
                classes=classes,
                calibration=OddsCalibration(),
                onnx=f"part-{index}.onnx",
                macs=1e3,
                parameters=100,
                latency_s=1e-5,
            )
        )
    whole = Whole(onnx="whole.onnx", macs=1e4, parameters=1000, latency_s=1e-4, eager_s=1e-3)
    table = PartTable(
        class_names=tuple(f"class {each}" for each in range(NUM_CLASSES)),
        input_shape=SHAPE,
        input_dtype="float32",
        groups=groups,
        held=held,
        parts=tuple(parts),
        whole=whole,
        redundancy=redundancy,
    )
    write_folder(path, table, files, {"holds": True})
    return read_folder(path)
