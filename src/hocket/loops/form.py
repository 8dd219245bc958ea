"""Intermediate representation of a loop body: linear index forms, views, accesses.

An index is a `Linear` form over atoms. An atom is a loop variable (``dim``), a scalar that the loop
does not change (``invariant``), the variable of a loop inside the iteration (``inner``), or a
``key``: any integer expression of loop variables, invariants and arrays that the loop never writes,
such as ``u[n]``. Keys are virtual loop dimensions; their values are known before the loop runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

AtomKind = Literal["dim", "key", "invariant", "inner"]
Kind = Literal["int", "float", "bool", "unknown"]
Mode = Literal["read", "write", "update"]


@dataclass(frozen=True, order=True)
class Atom:
    """One unknown of a linear index form."""

    kind: AtomKind
    name: str
    """The variable's name, or the text of the expression."""


@dataclass(frozen=True)
class Linear:
    """``const + Σ coefficient × atom`` with integer coefficients, none of them zero."""

    terms: tuple[tuple[Atom, int], ...] = ()
    const: int = 0

    @staticmethod
    def of(atom: Atom) -> Linear:
        """The form that consists of one atom."""
        return Linear(((atom, 1),))

    def __add__(self, other: Linear) -> Linear:
        sums = dict(self.terms)
        for atom, factor in other.terms:
            sums[atom] = sums.get(atom, 0) + factor
        # Sorted and without zeros, so that equal forms are equal values.
        kept = tuple(sorted((atom, factor) for atom, factor in sums.items() if factor))
        return Linear(kept, self.const + other.const)

    def __sub__(self, other: Linear) -> Linear:
        return self + other.scaled(-1)

    def scaled(self, factor: int) -> Linear:
        """The form multiplied by an integer."""
        if not factor:
            return Linear()
        terms = tuple((atom, coefficient * factor) for atom, coefficient in self.terms)
        return Linear(terms, self.const * factor)

    @property
    def is_const(self) -> bool:
        """True if the form is a constant."""
        return not self.terms

    @property
    def varying(self) -> tuple[tuple[Atom, int], ...]:
        """The terms that differ between iterations."""
        return tuple(term for term in self.terms if term[0].kind != "invariant")

    @property
    def invariant(self) -> Linear:
        """The terms that are equal in all iterations, and the constant."""
        kept = tuple(term for term in self.terms if term[0].kind == "invariant")
        return Linear(kept, self.const)

    @property
    def variable(self) -> Atom | None:
        """The loop variable if the form consists of it alone, else None."""
        if len(self.terms) != 1 or self.const:
            return None
        ((atom, factor),) = self.terms
        return atom if factor == 1 and atom.kind in ("dim", "inner") else None

    def has(self, kind: AtomKind) -> bool:
        """True if an atom of a kind occurs."""
        return any(atom.kind == kind for atom, _ in self.terms)

    def text(self) -> str:
        """Format as Python source."""
        parts = [
            atom.name if factor == 1 else f"{factor} * ({atom.name})" for atom, factor in self.terms
        ]
        if self.const or not parts:
            parts.append(str(self.const))
        return " + ".join(parts)


@dataclass(frozen=True)
class Sub:
    """One subscript position of an access: an index, or a slice that keeps the dimension."""

    index: Linear | None = None
    """The index; None if it is unknown."""
    is_guarded: bool = False
    """True if a condition around the access excludes a negative index."""
    segment: tuple[str, str] | None = None
    """Start and stop of the cells that one iteration touches, as expressions."""
    is_slice: bool = False
    whole: bool = False
    """True for a full slice: a later subscript of the view applies to this position unchanged."""


ANY_SLICE = Sub(is_slice=True)
WHOLE = Sub(is_slice=True, whole=True)


@dataclass(frozen=True)
class View:
    """Part of an array: its name and one `Sub` per dimension. New memory has the name ``""``."""

    base: str
    subs: tuple[Sub, ...]
    is_opaque: bool = False
    """True if its shape is not the array's (transposed, reshaped): it may refer to any cell."""
    kind: Kind = "unknown"
    """Kind of the numbers in newly allocated memory."""

    @property
    def keeps_dimensions(self) -> bool:
        """True if it is a view rather than one number."""
        return self.is_opaque or any(sub.is_slice for sub in self.subs)


@dataclass(frozen=True)
class Scalar:
    """A number; ``text`` is its expression if that depends on nothing that the loop writes."""

    linear: Linear | None = None
    text: str | None = None
    kind: Kind = "unknown"


@dataclass(frozen=True)
class Array:
    """An array that may be any one of several views."""

    views: frozenset[View]


@dataclass(frozen=True)
class Tuple:
    """A tuple of values."""

    items: tuple[Value, ...]


Value = Scalar | Array | Tuple

UNKNOWN = Scalar()


def fresh(kind: Kind = "unknown") -> Array:
    """Memory that the loop body allocates itself."""
    return Array(frozenset({View("", (), kind=kind)}))


FRESH = fresh()


@dataclass(frozen=True)
class Access:
    """One read or write of an array in the body."""

    array: str
    subs: tuple[Sub, ...]
    mode: Mode
    line: int
    text: str
    op: str = ""
    """Operator of an update such as ``+=``; empty for other accesses."""
    kind: Kind = "unknown"
    """Kind of the number that an update adds."""

    @property
    def writes(self) -> bool:
        """True if it may change the array."""
        return self.mode != "read"

    @property
    def label(self) -> str:
        """Format as text: expression, kind of access, line."""
        verb = {"read": "read", "write": "written", "update": "updated"}[self.mode]
        return f"{self.text} ({verb}, line {self.line})"


@dataclass(frozen=True)
class Inner:
    """A loop inside the iteration; its range is set if it is known before the loop."""

    start: str | None
    stop: str | None
    first: Linear | None = None
    end: Linear | None = None
    """``first`` and ``end``: start and stop as linear forms if the step is 1."""


@dataclass(frozen=True)
class Body:
    """Memory accesses of one iteration; ``dims`` are the variables of the iteration space."""

    dims: tuple[str, ...]
    accesses: tuple[Access, ...]
    inner: dict[str, Inner] = field(default_factory=dict)
    """Ranges of inner loops by the atom name of their variable."""
    has_local_arrays: bool = False
    """True if an array that the body allocates is subscripted."""

    @property
    def written(self) -> frozenset[str]:
        """Arrays that the loop may change."""
        return frozenset(access.array for access in self.accesses if access.writes)


class Refusal(Exception):  # noqa: N818  (a verdict, not an error)
    """The reason why a loop cannot be proven parallel, with its source lines."""

    def __init__(self, reason: str, *lines: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lines = lines
