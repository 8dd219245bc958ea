"""One rule for everything that is warmed up, captured and replayed as a CUDA graph.

A graph repeats calls with the addresses and numbers that were right when it was captured. So what
is to be replayed states all of those as a key. The first steps with a key run call by call, so that
libraries choose their kernels and take what memory they need; the next one is captured, and from
then on it is replayed. Another key begins anew. What cannot be captured is no failure: it goes on
call by call, and says why.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from hocket.base.errors import one_line

NUM_WARM = 2
"""Steps call by call before the capture."""
REPLAYED = "replayed as a CUDA graph"
NOT_CUDA = "graphs are for CUDA devices"
AS_ASKED = "as asked for"


def called(why: str) -> str:
    """How steps run that are not replayed, for people."""
    return f"call by call: {why}"


def never_replayed(device: torch.device) -> str:
    """The same of steps that nobody means to replay."""
    return called(AS_ASKED if device.type == "cuda" else NOT_CUDA)


Captured = TypeVar("Captured")


class Same:
    """A key that is met by one object alone, whatever it holds."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class Repeats(Generic[Captured]):
    """Whether a step is one of those before again, and what was captured of them."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        """Why steps are not replayed; empty where they are or will be."""
        self.captured: Captured | None = None
        self._key: Any = None
        self._num_alike = 0

    @property
    def told(self) -> str:
        """How the next step with the same key runs, for people."""
        if self.refusal:
            return called(self.refusal)
        if self.captured is not None or self._num_alike >= NUM_WARM:
            return REPLAYED
        left = NUM_WARM - self._num_alike
        return called(f"{left} more {'step' if left == 1 else 'steps'} alike before a graph")

    def find(self, key: Any, capture: Callable[[], Captured]) -> Captured | None:
        """What to replay; None where this step is to run call by call."""
        if self.refusal:
            return None
        if key != self._key:
            self._key, self._num_alike, self.captured = key, 0, None
        if self.captured is None and self._num_alike >= NUM_WARM:
            try:
                self.captured = capture()
            # Whatever a kernel or a library raises: steps go on without a graph.
            except Exception as error:
                # The end of a capture that has failed raises too, and says less than what failed.
                causes = [error, *([error.__context__] if error.__context__ else [])]
                self.refusal = "; after ".join(map(one_line, causes))
                del causes
        if self.refusal and torch.cuda.is_available():
            # The pool of a graph that failed goes with its last reference, which tracebacks hold.
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
        self._num_alike += 1
        return self.captured
