"""Interface of plan sections: conversion to and from plain data, and verification.

A new section is a frozen dataclass in a file of its own, a line in ``SECTIONS`` and an entry in
``plan_schema.json``; plan files and ``hocket verify`` then support it.
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
    """Base class of sections; a section holds the decisions of one type."""

    @abstractmethod
    def to_data(self) -> dict[str, Any]:
        """The section as plain data, ready for JSON."""

    @classmethod
    @abstractmethod
    def from_data(cls, data: object, problem: Problem) -> Self:
        """Read the section strictly; raises an `InputFileError` that names the wrong key."""

    @abstractmethod
    def verify(self, problem: Problem, plan: Plan) -> Iterator[Violation]:
        """Yield the broken rules that can be found without simulating."""
