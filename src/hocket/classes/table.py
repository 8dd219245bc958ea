"""Description of a folder of parts: classes, groups, copies, calibration, measurements.

The table holds plain data, read from JSON with every field checked; nothing in it names code.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any

from hocket.base import fields
from hocket.base.errors import InputFileError
from hocket.classes.combine import Combiner, OddsCalibration

SCHEMA = "hocket-classes-1"
INPUT_DTYPES = ("float32", "int64")
_MAX_CLASSES = 100_000
_MAX_DIM = 1 << 24
_MAX_NUMBERS = 1 << 28
"""Most elements of one input."""


@dataclass(frozen=True)
class ServedPart:
    """Description of one part as it is served."""

    classes: tuple[int, ...]
    calibration: OddsCalibration
    onnx: str
    exported: str
    macs: float
    parameters: int
    latency_s: float
    """Time of one input on one thread in ONNX Runtime, on the machine that made the split."""


@dataclass(frozen=True)
class Whole:
    """Description of the net that was split, for comparison."""

    onnx: str
    macs: float
    parameters: int
    latency_s: float
    eager_s: float


@dataclass(frozen=True)
class PartTable:
    """Description of a folder that serving needs."""

    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]
    input_dtype: str
    groups: tuple[tuple[int, ...], ...]
    held: tuple[tuple[int, ...], ...]
    """Groups that each part holds."""
    parts: tuple[ServedPart, ...]
    whole: Whole
    redundancy: int
    doubt: float = 0.0
    """Exponent for classes with missing answers, see `Combiner`."""
    hashes: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the files in the folder, by name."""

    def combiner(self) -> Combiner:
        """Combiner of the parts' answers."""
        return Combiner(
            len(self.class_names),
            tuple(part.classes for part in self.parts),
            tuple(part.calibration for part in self.parts),
            self.doubt,
        )

    @property
    def quorum(self) -> int:
        """Answers per class that suffice if a worker is late: one less than its copies, at least
        one."""
        return max(1, self.redundancy - 1)

    def to_data(self) -> dict[str, Any]:
        """Return JSON-serialisable data."""
        return {
            "schema": SCHEMA,
            "class_names": list(self.class_names),
            "input": {"shape": list(self.input_shape), "dtype": self.input_dtype},
            "groups": [list(group) for group in self.groups],
            "held": [list(groups) for groups in self.held],
            "redundancy": self.redundancy,
            "doubt": self.doubt,
            "parts": [
                {
                    "classes": list(part.classes),
                    "scale": part.calibration.scale,
                    "shift": part.calibration.shift,
                    "onnx": part.onnx,
                    "exported": part.exported,
                    "macs": part.macs,
                    "parameters": part.parameters,
                    "latency_s": part.latency_s,
                }
                for part in self.parts
            ],
            "whole": {
                "onnx": self.whole.onnx,
                "macs": self.whole.macs,
                "parameters": self.whole.parameters,
                "latency_s": self.whole.latency_s,
                "eager_s": self.whole.eager_s,
            },
            "hashes": dict(self.hashes),
        }

    @classmethod
    def from_data(cls, data: object) -> PartTable:
        """Read the table from JSON data and check it."""
        keys = ("schema", "class_names", "input", "groups", "held", "redundancy", "parts", "whole",
                "hashes")  # fmt: skip
        table = fields.record(data, "table", required=keys, optional=("doubt",))
        fields.choice(table["schema"], "schema", (SCHEMA,))
        names = tuple(fields.text_column(table["class_names"], "class_names"))
        given = fields.record(table["input"], "input", required=("shape", "dtype"))
        shape = fields.int_column(given["shape"], "input.shape", 1, _MAX_DIM)
        groups = _lists(table["groups"], "groups", len(names))
        held = _lists(table["held"], "held", len(groups))
        parts = tuple(
            _part(each, f"parts[{index}]", len(names))
            for index, each in enumerate(fields.items(table["parts"], "parts"))
        )
        hashes = {
            _file_name(name, "hashes"): fields.text(value, fields.inside("hashes", name))
            for name, value in fields.mapping(table["hashes"], "hashes").items()
        }
        made = cls(
            names,
            tuple(int(each) for each in shape),
            fields.choice(given["dtype"], "input.dtype", INPUT_DTYPES),
            groups,
            held,
            parts,
            _whole(table["whole"]),
            fields.integer(table["redundancy"], "redundancy", 1, 1000),
            fields.number(table.get("doubt", 0.0), "doubt", 0, 1),
            hashes,
        )
        _check(made)
        return made


def _part(data: object, path: str, num_classes: int) -> ServedPart:
    keys = ("classes", "scale", "shift", "onnx", "exported", "macs", "parameters", "latency_s")
    part = fields.record(data, path, required=keys)
    classes = fields.int_column(part["classes"], f"{path}.classes", 0, num_classes - 1)
    return ServedPart(
        tuple(int(each) for each in classes),
        OddsCalibration(
            fields.number(part["scale"], f"{path}.scale", 0, 1e6),
            fields.number(part["shift"], f"{path}.shift", -1e6, 1e6),
        ),
        _file_name(part["onnx"], f"{path}.onnx"),
        _file_name(part["exported"], f"{path}.exported"),
        fields.number(part["macs"], f"{path}.macs", 0, 1e18),
        fields.integer(part["parameters"], f"{path}.parameters", 0, 10**15),
        fields.number(part["latency_s"], f"{path}.latency_s", 0, 1e6),
    )


def _whole(data: object) -> Whole:
    keys = ("onnx", "macs", "parameters", "latency_s", "eager_s")
    whole = fields.record(data, "whole", required=keys)
    return Whole(
        _file_name(whole["onnx"], "whole.onnx"),
        fields.number(whole["macs"], "whole.macs", 0, 1e18),
        fields.integer(whole["parameters"], "whole.parameters", 0, 10**15),
        fields.number(whole["latency_s"], "whole.latency_s", 0, 1e6),
        fields.number(whole["eager_s"], "whole.eager_s", 0, 1e6),
    )


def _file_name(value: object, path: str) -> str:
    """Check a name of a file in the folder itself: a table must not make a server read others."""
    name = fields.text(value, path)
    if not name or "/" in name or "\\" in name or name.startswith(".") or "\0" in name:
        raise fields.wrong(path, value, "the name of a file in the same folder")
    return name


def _lists(value: object, path: str, limit: int) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(int(x) for x in fields.int_column(each, f"{path}[{index}]", 0, limit - 1))
        for index, each in enumerate(fields.items(value, path))
    )


def _check(table: PartTable) -> None:
    """Check that the fields agree: every class is held, by parts that list it."""
    num_classes = len(table.class_names)
    if not 2 <= num_classes <= _MAX_CLASSES:
        raise InputFileError(f"class_names has {num_classes} entries", hint="two classes at least")
    if prod(table.input_shape) > _MAX_NUMBERS:
        raise InputFileError(f"input.shape {table.input_shape} has too many numbers")
    if sorted(each for group in table.groups for each in group) != list(range(num_classes)):
        raise InputFileError("groups do not hold every class once", hint="make the folder again")
    if len(table.held) != len(table.parts):
        raise InputFileError(f"held has {len(table.held)} entries for {len(table.parts)} parts")
    for index, (groups, part) in enumerate(zip(table.held, table.parts, strict=True)):
        classes = tuple(sorted(each for group in groups for each in table.groups[group]))
        if classes != part.classes:
            raise InputFileError(f"parts[{index}].classes are not those of its groups")
    if {group for groups in table.held for group in groups} != set(range(len(table.groups))):
        raise InputFileError("some group is held by no part", hint="make the folder again")
    copies = Counter(group for groups in table.held for group in set(groups))
    if set(copies.values()) != {table.redundancy}:
        raise InputFileError(
            f"redundancy is {table.redundancy} and groups are held {sorted(set(copies.values()))} "
            "times",
            hint="make the folder again",
        )
