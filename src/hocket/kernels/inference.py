"""Types of kernels, found with the same question asked once.

For each operation of a function the compiler asks all that it knows under the operation's name,
one after the other, until one of them takes the types, and it goes over the whole function several
times. What an operation gives depends on it and on the types of what it is given alone, so answers
are kept for the process; those about functions that Python made, which may go away, for one
compilation. The hash of a tuple of tuples of arrays, by which all of this is looked up, is kept
with its type. Finding types takes half the time by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import types
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NopythonTypeInference

_Inference: Any = NopythonTypeInference
_registered: Any = register_pass(mutates_CFG=True, analysis_only=False)  # type: ignore[no-untyped-call]
_HASH = "_hash_in_this_process"
_UNKNOWN = object()


class _Answers:
    """What a typing context answered."""

    def __init__(self) -> None:
        self.builtin: dict[Any, Any] = {}
        self.passing: dict[Any, Any] = {}
        self.attribute: dict[Any, Any] = {}
        self.depth = 0


_answers = _Answers()


@_registered
class RememberingInference(_Inference):  # type: ignore[misc]
    """The compiler's own inference, which asks the table first."""

    _name = "remembering_inference"

    def run_pass(self, state: Any) -> Any:
        """Find the types of all variables."""
        with _remembering(state.typingctx):
            return super().run_pass(state)


@contextmanager
def _remembering(context: Any) -> Iterator[None]:
    """While this lasts, a context answers from the table; the compiler's lock is held."""
    _answers.depth += 1
    if _answers.depth == 1:
        own = vars(context)
        own["resolve_function_type"] = _function_types(context.resolve_function_type)
        own["resolve_getattr"] = _attribute_types(context.resolve_getattr)
        own["resolve_setitem"] = _item_types(context.resolve_setitem)
    try:
        yield
    finally:
        _answers.depth -= 1
        if _answers.depth == 0:
            for name in ("resolve_function_type", "resolve_getattr", "resolve_setitem"):
                del vars(context)[name]
            _answers.passing.clear()


def _function_types(resolve: Any) -> Any:
    def resolved(function: Any, arguments: Any, named: Any) -> Any:
        if isinstance(function, types.Function):
            table = _answers.builtin
        elif isinstance(function, types.Dispatcher):
            table = _answers.passing
        else:
            return resolve(function, arguments, named)
        key = function, tuple(arguments), tuple(sorted(dict(named).items()))
        answer = table.get(key)
        if answer is None:
            answer = resolve(function, arguments, named)
            if answer is not None:
                table[key] = answer
        return answer

    return resolved


def _attribute_types(resolve: Any) -> Any:
    def resolved(kind: Any, attribute: str) -> Any:
        if not isinstance(kind, types.BaseNamedTuple | types.Record | types.Array):
            return resolve(kind, attribute)
        answer = _answers.attribute.get((kind, attribute), _UNKNOWN)
        if answer is _UNKNOWN:
            answer = _answers.attribute[kind, attribute] = resolve(kind, attribute)
        return answer

    return resolved


def _item_types(resolve: Any) -> Any:
    def resolved(target: Any, index: Any, value: Any) -> Any:
        key = "setitem", target, index, value
        answer = _answers.builtin.get(key)
        if answer is None:
            answer = _answers.builtin[key] = resolve(target, index, value)
        return answer

    return resolved


def remember_hashes() -> None:
    """From now on, types of tuples and arrays compute their hash once."""
    for kind in (types.NamedTuple, types.Array):
        _remember_hash(kind)


def _remember_hash(kind: Any) -> None:
    usual = kind.__hash__

    def found(self: Any) -> int:
        known = vars(self).get(_HASH)
        if known is None:
            known = vars(self)[_HASH] = usual(self)
        return int(known)

    def state(self: Any) -> dict[str, Any]:
        # Texts have another hash in another process.
        return {name: value for name, value in vars(self).items() if name != _HASH}

    kind.__hash__, kind.__getstate__ = found, state
