"""Coefficients that fit predicted step times to a cluster, with the measured runs behind them.

A dozen factors scale parts of the predicted time. Anchors are the measured runs, from which similar
configs get a correction that the factors do not explain. Both are stored as one JSON file.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hocket.base.atomic import write_atomically
from hocket.base.fields import items, located, number, record, sized, text, wrong
from hocket.base.jsonfile import dump_json, read_json

COEFFICIENTS_SCHEMA = "hocket.parallel-coefficients/1"
MAX_FILE_BYTES = 1_000_000
# Values outside this range come from errors in the runs, not from hardware.
MIN_COEFFICIENT, MAX_COEFFICIENT = 1e-3, 1e3
SIMULATED = "simulated steps"
"""First words of ``source`` for coefficients that were fitted to simulated steps only."""
NUM_COORDINATES = 15
"""Number of coordinates of `Anchor.place`; `hocket.cost.parallel.similarity.places` lists them."""
_MAX_PLACE, _MAX_WEIGHT = 64.0, 100.0


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A measured run, from which similar runs get a correction of their predicted time."""

    program: str
    place: tuple[float, ...]
    weight: float
    """Logarithm of the correction of a run with exactly the same place and program."""


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Factors on parts of the predicted time, 1 by default, and the runs they were fitted to."""

    matrix: float = 1.0
    """Factor on the time of matrix products with weights."""
    shape: float = 1.0
    """Factor on the loss of efficiency of small matrix products."""
    attention: float = 1.0
    """Factor on the time of attention's matrix products between tokens."""
    unaligned: float = 1.0
    """Further factor on plain attention if the head width is not a multiple of eight."""
    memory: float = 1.0
    """Factor on memory-bound ops: norms, dropout, softmax, optimizer."""
    host: float = 1.0
    """Factor on the host's time to launch a layer; matters if the device finishes sooner."""
    layer: float = 1.0
    """Factor on the constant overhead of each layer (gaps between its kernels)."""
    tensor: float = 1.0
    """Factor on the time per byte of collectives inside a host."""
    latency: float = 1.0
    """Factor on the latency of collectives."""
    network: float = 1.0
    """Factor on the time per byte of collectives between hosts."""
    pipeline: float = 1.0
    """Factor on transfers between pipeline stages."""
    gradients: float = 1.0
    """Factor on the time to add each microbatch's gradients to their sum."""
    source: str = ""
    """Origin of the runs that the coefficients were fitted to; empty for the defaults."""
    anchors: tuple[Anchor, ...] = ()
    """Runs that the coefficients were fitted to; similar configs get a correction from them."""

    @property
    def is_measured(self) -> bool:
        """True if the coefficients were fitted to measured runs."""
        return bool(self.source) and not self.source.startswith(SIMULATED)


NAMES = tuple(f.name for f in fields(Coefficients) if f.name not in ("source", "anchors"))
"""Names of the factors, in order."""


def coefficients_to_dict(coefficients: Coefficients) -> dict[str, object]:
    """Coefficients as the content of a JSON file; without the key ``anchors`` if there are none."""
    values = {name: value for name, value in asdict(coefficients).items() if name != "anchors"}
    anchors = [{**asdict(anchor), "place": list(anchor.place)} for anchor in coefficients.anchors]
    return {"schema": COEFFICIENTS_SCHEMA, **values, **({"anchors": anchors} if anchors else {})}


def coefficients_from_dict(data: object, where: str = "coefficients") -> Coefficients:
    """Coefficients from the content of a JSON file; factors that it does not name are 1."""
    with located(where):
        entries = record(
            data, "the file", required=("schema",), optional=(*NAMES, "source", "anchors")
        )
        if entries["schema"] != COEFFICIENTS_SCHEMA:
            raise wrong("schema", entries["schema"], repr(COEFFICIENTS_SCHEMA))
        values = {
            name: number(entries[name], name, MIN_COEFFICIENT, MAX_COEFFICIENT)
            for name in NAMES
            if name in entries
        }
        source = text(entries.get("source", ""), "source")
        anchors = tuple(
            _anchor(anchor, f"anchors[{position}]")
            for position, anchor in enumerate(items(entries.get("anchors", []), "anchors"))
        )
    return Coefficients(**values, source=source, anchors=anchors)


def read_coefficients(path: str | Path) -> Coefficients:
    """Read the coefficients from a file that `write_coefficients` wrote."""
    return coefficients_from_dict(read_json(path, MAX_FILE_BYTES), str(path))


def write_coefficients(coefficients: Coefficients, path: str | Path) -> None:
    """Write the coefficients as JSON, atomically."""
    write_atomically(path, dump_json(coefficients_to_dict(coefficients)))


def _anchor(data: object, path: str) -> Anchor:
    entry = record(data, path, required=("program", "place", "weight"))
    place = sized(entry["place"], f"{path}.place", NUM_COORDINATES, "one number per coordinate")
    return Anchor(
        program=text(entry["program"], f"{path}.program"),
        place=tuple(number(value, f"{path}.place", -_MAX_PLACE, _MAX_PLACE) for value in place),
        weight=number(entry["weight"], f"{path}.weight", -_MAX_WEIGHT, _MAX_WEIGHT),
    )
