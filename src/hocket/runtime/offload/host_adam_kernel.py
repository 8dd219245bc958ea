"""Numba kernel of a float32 AdamW step with bfloat16 gradients that also writes a bfloat16 copy.

The kernel makes one pass over memory, in equal stripes that threads process in parallel; bfloat16
values are passed as bits. It rounds and fuses sums and products where PyTorch's kernel does, so
that the results are equal bit for bit. The signature is fixed, so that numba compiles the kernel
when this file is imported, never during training. numba's intrinsics are public API
(``numba.extending``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import prange, types
from numba.extending import intrinsic

_F = TypeVar("_F", bound=Callable[..., Any])
_intrinsic: Any = intrinsic


_one: Any = types.float32
_lines, _bit_lines = 3 * (_one[::1],), 2 * (types.int16[::1],)
_STRIPE = types.void(*_lines, *_bit_lines, *(7 * (_one,)))
_LOOP = types.void(*_lines, *_bit_lines, *(7 * (_one,)), types.int64)


def _compiled(signature: Any, *, parallel: bool = False) -> Callable[[_F], _F]:
    made: Any = numba.njit(
        [signature], nogil=True, error_model="numpy", cache=True, parallel=parallel
    )
    wrap: Callable[[_F], _F] = made
    return wrap


@_intrinsic  # type: ignore[untyped-decorator]
def _fused(_context: Any, _left: Any, _right: Any, _added: Any) -> Any:
    """Fused multiply-add."""
    one = types.float32
    return one(one, one, one), lambda _, builder, __, given: builder.fma(*given)


@_intrinsic  # type: ignore[untyped-decorator]
def _bits(_context: Any, _value: Any) -> Any:
    return types.int32(types.float32), _cast_to(types.int32)


@_intrinsic  # type: ignore[untyped-decorator]
def _value(_context: Any, _bits_of_it: Any) -> Any:
    return types.float32(types.int32), _cast_to(types.float32)


def _cast_to(kind: Any) -> Any:
    def cast(target: Any, builder: Any, _: Any, given: Any) -> Any:
        return builder.bitcast(given[0], target.get_value_type(kind))

    return cast


@_compiled(_STRIPE)
def _stripe(
    parameter: Any, mean: Any, square: Any, gradient: Any, low_precision: Any, keep: Any, new: Any,
    old_square: Any, new_square: Any, step_size: Any, correction: Any, epsilon: Any,
) -> None:  # fmt: skip
    for at in range(len(parameter)):
        given = _value(np.int32(np.int32(gradient[at]) << np.int32(16)))
        moved = _fused(new, given - mean[at], mean[at])
        squared = _fused(new_square * given, given, square[at] * old_square)
        mean[at], square[at] = moved, squared
        below = np.sqrt(squared) / correction + epsilon
        value = parameter[at] * keep + step_size * moved / below
        parameter[at] = value
        # Round to nearest even; NaN stays NaN.
        bits = _bits(value)
        odd = (bits >> np.int32(16)) & np.int32(1)
        near = np.int32(bits + np.int32(0x7FFF) + odd) >> np.int32(16)
        low_precision[at] = np.int16(near if value == value else np.int32(0x7FC0))


@_compiled(_LOOP, parallel=True)
def adam_loop(
    parameter: Any, mean: Any, square: Any, gradient: Any, low_precision: Any, keep: Any, new: Any,
    old_square: Any, new_square: Any, step_size: Any, correction: Any, epsilon: Any, count: Any,
) -> None:  # fmt: skip
    """Update all elements in ``count`` stripes; gradients and low-precision copies are bits."""
    size = len(parameter)
    for number in prange(count):
        a, b = size * number // count, size * (number + 1) // count
        _stripe(
            parameter[a:b], mean[a:b], square[a:b], gradient[a:b], low_precision[a:b], keep, new,
            old_square, new_square, step_size, correction, epsilon,
        )  # fmt: skip
