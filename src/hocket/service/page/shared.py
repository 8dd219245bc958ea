"""Something that many ask for at once and that is made once for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Shared(Generic[Made]):
    """What ``make`` makes, by one thread at a time. Nobody gets what was begun before he asked, so
    that whoever changed something sees it; all who ask while one is being made share the next."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self._changed = threading.Condition()
        self._num_begun = 0
        self._is_making = False
        self._newest: tuple[int, Made] | None = None

    def get(self) -> Made:
        """A value that was begun after this call."""
        with self._changed:
            last_begun = self._num_begun
            while self._is_making:
                self._changed.wait()
                if self._newest is not None and self._newest[0] > last_begun:
                    return self._newest[1]
            self._is_making = True
            self._num_begun += 1
            mine = self._num_begun
        try:
            made = self._make()
            self._newest = (mine, made)
            return made
        finally:
            with self._changed:
                self._is_making = False
                self._changed.notify_all()
