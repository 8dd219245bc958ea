"""Coefficients that fit predictions of parallel training to a cluster: a dozen, and runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hocket.base.atomic import write_atomically
from hocket.base.fields import items, located, number, record, sized, text, wrong
from hocket.base.jsonfile import dump_json, read_json

COEFFICIENTS_SCHEMA = "hocket.parallel-coefficients/1"
MAX_FILE_BYTES = 1_000_000
MIN_COEFFICIENT, MAX_COEFFICIENT = 1e-3, 1e3
NUM_COORDINATES = 15
"""Of a run's place; `hocket.cost.parallel.similarity.places` says which."""
_MAX_PLACE, _MAX_WEIGHT = 64.0, 100.0


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A measured run, and what it adds to the predictions of runs like it."""

    program: str
    place: tuple[float, ...]
    weight: float
    """Logarithm that a run of the same place gets from it."""


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Each multiplies a part of the predicted time; 1 where nothing was measured."""

    matrix: float = 1.0
    """Matrix products with weights."""
    shape: float = 1.0
    """Loss of efficiency of small matrices against large ones."""
    attention: float = 1.0
    """Matrix products between tokens."""
    unaligned: float = 1.0
    """The same, where the width of heads is no multiple of eight."""
    memory: float = 1.0
    """Operations that wait for memory: norms, dropout, softmax, optimizer."""
    host: float = 1.0
    """The host's work to launch a layer, which counts where the device would be done sooner."""
    layer: float = 1.0
    """Constant overhead of each layer, whatever its size."""
    tensor: float = 1.0
    """Bytes of collectives inside a host."""
    latency: float = 1.0
    """Start of collectives."""
    network: float = 1.0
    """Bytes of collectives between hosts."""
    pipeline: float = 1.0
    """Transfers between pipeline stages."""
    gradients: float = 1.0
    """Adding each microbatch's gradients to the sum."""
    source: str = ""
    """Origin of the measured runs that they were fitted to."""
    anchors: tuple[Anchor, ...] = ()
    """The runs that they were fitted to: runs like them share what no coefficient explains."""


NAMES = tuple(f.name for f in fields(Coefficients) if f.name not in ("source", "anchors"))
"""Names of the numbers, in order."""


def coefficients_to_dict(coefficients: Coefficients) -> dict[str, object]:
    """The content of a coefficients file; anchors only where there are some."""
    values = {name: value for name, value in asdict(coefficients).items() if name != "anchors"}
    anchors = [{**asdict(anchor), "place": list(anchor.place)} for anchor in coefficients.anchors]
    return {"schema": COEFFICIENTS_SCHEMA, **values, **({"anchors": anchors} if anchors else {})}


def coefficients_from_dict(data: object, where: str = "coefficients") -> Coefficients:
    """The coefficients of such content; those that are not named are 1."""
    with located(where):
        entries = record(
            data, "the file", required=("schema",), optional=(*NAMES, "source", "anchors")
        )
        if entries["schema"] != COEFFICIENTS_SCHEMA:
            raise wrong("schema", entries["schema"], repr(COEFFICIENTS_SCHEMA))
        values = _values(entries)
        source = text(entries.get("source", ""), "source")
        anchors = tuple(
            _anchor(anchor, f"anchors[{position}]")
            for position, anchor in enumerate(items(entries.get("anchors", []), "anchors"))
        )
    return Coefficients(**values, source=source, anchors=anchors)


def read_coefficients(path: str | Path) -> Coefficients:
    """The coefficients of a file that `write_coefficients` wrote."""
    return coefficients_from_dict(read_json(path, MAX_FILE_BYTES), str(path))


def write_coefficients(coefficients: Coefficients, path: str | Path) -> None:
    """Write them as JSON, whole or not at all."""
    write_atomically(path, dump_json(coefficients_to_dict(coefficients)))


def _anchor(data: object, path: str) -> Anchor:
    entry = record(data, path, required=("program", "place", "weight"))
    place = sized(entry["place"], f"{path}.place", NUM_COORDINATES, "one number per coordinate")
    return Anchor(
        program=text(entry["program"], f"{path}.program"),
        place=tuple(number(value, f"{path}.place", -_MAX_PLACE, _MAX_PLACE) for value in place),
        weight=number(entry["weight"], f"{path}.weight", -_MAX_WEIGHT, _MAX_WEIGHT),
    )


def _values(entries: Mapping[str, object]) -> dict[str, float]:
    return {
        name: number(entries[name], name, MIN_COEFFICIENT, MAX_COEFFICIENT)
        for name in NAMES
        if name in entries
    }
