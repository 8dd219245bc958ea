"""Named tuples handed from kernel to kernel whole.

The compiler takes a tuple apart at every call, seven values per array, and the function that is
called puts it together again: of the code of the simulator, before optimisation, more than half did
nothing else, and writing and reading that code is most of what compiling takes. Handed over as one
value, the tuple of a call is one argument. It holds for named tuples of this package alone: the
code of others keeps its form, which may be compiled and kept on disk already.
"""

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.core.datamodel import registry
from numba.core.datamodel.models import TupleModel

_TupleModel: Any = TupleModel
_manager: Any = registry.default_manager


class _WholeTupleModel(_TupleModel):  # type: ignore[misc]
    """A tuple that is an argument as it is."""

    def get_argument_type(self) -> Any:
        """One value."""
        return self.get_value_type()

    def as_argument(self, builder: Any, value: Any) -> Any:
        """The value itself."""
        return value

    def from_argument(self, builder: Any, value: Any) -> Any:
        """The value itself."""
        return value


def hand_over_whole() -> None:
    """From now on, named tuples of this package are."""
    package = __name__.partition(".")[0]
    usual = _manager._handlers[types.NamedTuple]

    def model(manager: Any, kind: Any) -> Any:
        is_own = kind.instance_class.__module__.partition(".")[0] == package
        return (_WholeTupleModel if is_own else usual)(manager, kind)

    _manager.register(types.NamedTuple, model)
