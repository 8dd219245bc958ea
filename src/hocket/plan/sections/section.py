"""Interface of plan sections: to plain data, back from it, and verification.

A new section is a frozen dataclass in a file of its own, a line in ``SECTIONS`` and an entry in
``plan_schema.json``; plan files and ``hocket verify`` then know it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem
    from hocket.plan.violation import Violation


class Section(ABC):
    """One kind of decision, as data."""

    @abstractmethod
    def to_data(self) -> dict[str, Any]:
        """The section as plain data, ready for JSON."""

    @classmethod
    @abstractmethod
    def from_data(cls, data: object, problem: Problem) -> Self:
        """The section of such data, read strictly; raises `InputFileError` that names the key."""

    @abstractmethod
    def verify(self, problem: Problem, plan: Plan) -> Iterator[Violation]:
        """Rules that it breaks as far as that shows without simulating."""
