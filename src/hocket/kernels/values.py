"""Variables of compiled code that are values, not places in memory.

The compiler gives every variable that several blocks use a place in memory, stores it there, loads
all of it at each use and clears it after the last: for a tuple of a hundred arrays each of these is
seven hundred instructions, which optimisation then takes out again. A variable that is assigned
once, in a block that every use comes after, needs no place: its value is used as it is. Clearing
serves the counting of references, which kernels that make no arrays do without. Of compiling the
kernels of `hocket plan` this takes a sixth off; the code that comes out is the same.
O(uses) with the dominators of the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numba.core import ir
from numba.core.analysis import compute_cfg_from_blocks, must_use_alloca
from numba.core.lowering import Lower

# Parts of the compiler that have no types.
_Lower: Any = Lower
_ir: Any = ir
_compute_cfg: Any = compute_cfg_from_blocks
_must_use_alloca: Any = must_use_alloca


class ValueLower(_Lower):  # type: ignore[misc]
    """The compiler's way from variables to instructions, with fewer places in memory."""

    @property
    def _counts_references(self) -> bool:
        return bool(self.flags.nrt)

    def _find_singly_assigned_variable(self) -> None:
        super()._find_singly_assigned_variable()
        if not self._counts_references:
            self._singly_assigned_vars |= values(self.func_ir.blocks)

    def storevar(self, value: Any, name: str, argidx: int | None = None) -> None:
        """Keep a value, without a look at the one before, whose references nobody counts."""
        if self._counts_references or name in self._singly_assigned_vars:
            super().storevar(value, name, argidx)
            return
        self._alloca_var(name, self.typeof(name))
        self.builder.store(value, self.getvar(name))

    def delvar(self, name: str) -> None:
        """Nothing, where nothing is to be released."""
        if self._counts_references:
            super().delvar(name)


def values(blocks: dict[int, Any]) -> set[str]:
    """Variables with one assignment, which comes before all uses in the code and in every run."""
    assigned: dict[str, int] = {}
    others = set(_must_use_alloca(blocks))
    uses: list[tuple[str, int]] = []
    # Blocks become code in the order of their numbers.
    for at, block in sorted(blocks.items()):
        for statement in block.body:
            for name in _read(statement):
                if name in assigned:
                    uses.append((name, at))
                else:
                    others.add(name)
            if isinstance(statement, _ir.Assign):
                if statement.target.name in assigned:
                    others.add(statement.target.name)
                assigned[statement.target.name] = at
    dominators = _compute_cfg(blocks).dominators()
    others.update(name for name, at in uses if assigned[name] not in dominators[at])
    return assigned.keys() - others


def _read(statement: Any) -> Iterator[str]:
    """Variables that a statement uses."""
    if isinstance(statement, _ir.Del):
        return
    if not isinstance(statement, _ir.Assign):
        yield from (variable.name for variable in statement.list_vars())
    elif isinstance(statement.value, _ir.Var):
        yield statement.value.name
    elif isinstance(statement.value, _ir.Expr):
        yield from (variable.name for variable in statement.value.list_vars())
