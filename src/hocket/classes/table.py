"""Description of a folder of parts: classes, groups, copies, calibration, measurements.

The table contains plain data, read from JSON with every field checked; nothing in it names code.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt

from hocket.base.checked import checked
from hocket.base.errors import InputFileError
from hocket.classes.combine import Combiner, OddsCalibration

_MAX_CLASSES = 100_000
_MAX_NUMBERS = 1 << 28
"""Maximum number of elements of one input."""

FileName = Annotated[str, Field(pattern=r"^[^./\\\x00][^/\\\x00]*$")]
"""Name of a file in the folder itself, so that a table cannot make a server read other files."""
Numbers = tuple[NonNegativeInt, ...]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ServedPart(_Record):
    """Description of one part as it is served."""

    classes: Numbers
    calibration: OddsCalibration
    onnx: FileName
    macs: NonNegativeFloat
    parameters: NonNegativeInt
    latency_s: NonNegativeFloat
    """Time of one input on one thread in ONNX Runtime, on the machine that made the split."""


class Whole(_Record):
    """Description of the net that was split, for comparison."""

    onnx: FileName
    macs: NonNegativeFloat
    parameters: NonNegativeInt
    latency_s: NonNegativeFloat
    eager_s: NonNegativeFloat


class PartTable(_Record):
    """Description of a folder that serving needs."""

    format: Literal["hocket-classes-2"] = "hocket-classes-2"
    class_names: Annotated[tuple[str, ...], Field(min_length=2, max_length=_MAX_CLASSES)]
    input_shape: tuple[Annotated[int, Field(ge=1)], ...]
    input_dtype: Literal["float32", "int64"]
    groups: tuple[Numbers, ...]
    held: tuple[Numbers, ...]
    """Groups that each part holds."""
    parts: tuple[ServedPart, ...]
    whole: Whole
    redundancy: int
    doubt: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Exponent for classes with missing answers; see `Combiner`."""
    hashes: dict[FileName, str] = {}
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
        """Number of answers per class that suffice if a worker is late: one less than its copies,
        at least one.
        """
        return max(1, self.redundancy - 1)

    def to_data(self) -> dict[str, Any]:
        """Return JSON-serialisable data."""
        return self.model_dump(mode="json")

    @classmethod
    def from_data(cls, data: object, where: str) -> PartTable:
        """Read the table from JSON data and check it; ``where`` names the file in errors."""
        table = checked(cls, data, where)
        if wrong := _disagreement(table):
            raise InputFileError(wrong, hint="make the folder again", where=where)
        return table


def _disagreement(table: PartTable) -> str:
    """Description of fields that do not agree; empty if every class is held by parts that list
    it."""
    if prod(table.input_shape) > _MAX_NUMBERS:
        return f"input_shape {table.input_shape} has too many numbers"
    if sorted(each for group in table.groups for each in group) != list(
        range(len(table.class_names))
    ):
        return "groups do not hold every class once"
    if len(table.held) != len(table.parts):
        return f"held has {len(table.held)} entries for {len(table.parts)} parts"
    copies = Counter(group for groups in table.held for group in set(groups))
    if sorted(copies) != list(range(len(table.groups))):
        return "some group is held by no part"
    if set(copies.values()) != {table.redundancy}:
        found = sorted(set(copies.values()))
        return f"redundancy is {table.redundancy} and groups are held {found} times"
    for index, (groups, part) in enumerate(zip(table.held, table.parts, strict=True)):
        classes = tuple(sorted(each for group in groups for each in table.groups[group]))
        if classes != part.classes:
            return f"parts[{index}].classes are not those of its groups"
    return ""
