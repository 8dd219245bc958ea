"""A recorded call as a function without arguments, with as little in between as possible.

What a call takes and gives is known when it is recorded, so that the questions which a general form
asks each time (is this a tensor, a list of tensors, something written to) are asked once. Small
steps, such as those of recurrent networks, are as quick as plain PyTorch by that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hocket.capture.perform import BoundCall
from hocket.capture.program import Call
from hocket.capture.recording import Ref

Slots = list[Any]
"""Tensors by number; None where there is none."""


def performed(bound: BoundCall, call: Call, slots: Slots) -> Callable[[], None]:
    """A call as a function without arguments that reads and writes slots."""
    if bound.named or isinstance(call.function, str) or not _gives_tensors(call):
        return partial(bound.perform, slots, 0)  # type: ignore[arg-type]
    lists = {at: bound.args[at] for at in bound.nested}
    if not all(type(items) is list and _all_refs(items) for items in lists.values()):
        return partial(bound.perform, slots, 0)  # type: ignore[arg-type]
    # What an overload calls in turn, without a frame of Python in between.
    function = getattr(bound.function, "_op", bound.function)
    numbers = {at: [item.number for item in items] for at, items in lists.items()}
    do = _of_one_or_two(function, bound, call, slots)
    if do is None:
        made = _made_by(function, bound, numbers, slots)
        do = _kept_one(made, call, slots) if _gives_one(call) else _kept_all(made, call, slots)
    return _renamed(do, bound.versions, slots) if bound.versions else do


def _made_by(
    function: Any, bound: BoundCall, numbers: Mapping[int, list[int]], slots: Slots
) -> Callable[[], Any]:
    constants, kwargs, refs = bound.args, bound.kwargs, tuple(bound.refs)
    lists = tuple(numbers.items())

    def made() -> Any:
        args = constants.copy()
        for position, number in refs:
            args[position] = slots[number]
        for position, several in lists:
            args[position] = [slots[number] for number in several]
        return function(*args, **kwargs)

    return made


def _kept_one(made: Callable[[], Any], call: Call, slots: Slots) -> Callable[[], None]:
    (output,) = call.outputs
    assert output is not None

    def do() -> None:
        slots[output] = made()

    return do


def _kept_all(made: Callable[[], Any], call: Call, slots: Slots) -> Callable[[], None]:
    outputs = call.outputs

    def do() -> None:
        for output, result in zip(outputs, made(), strict=True):
            if output is not None:
                slots[output] = result

    return do


def _renamed(
    do: Callable[[], None], versions: Sequence[tuple[int, int]], slots: Slots
) -> Callable[[], None]:
    """A call that writes to its arguments: what it has written goes by another number."""

    def do_and_rename() -> None:
        do()
        for before, after in versions:
            slots[after] = slots[before]

    return do_and_rename


def _of_one_or_two(
    function: Any, bound: BoundCall, call: Call, slots: Slots
) -> Callable[[], None] | None:
    """A call that takes one or two tensors and nothing else, which most do: no list is made."""
    numbers = [number for _, number in bound.refs]
    if bound.kwargs or len(numbers) != len(bound.args) or not _gives_one(call):
        return None
    (output,) = call.outputs
    assert output is not None
    if len(numbers) == 1:
        (first,) = numbers

        def of_one() -> None:
            slots[output] = function(slots[first])

        return of_one
    if len(numbers) == 2:
        left, right = numbers

        def of_two() -> None:
            slots[output] = function(slots[left], slots[right])

        return of_two
    return None


def _gives_one(call: Call) -> bool:
    return (
        len(call.outputs) == 1 and call.outputs[0] is not None and _result_types(call) == ["Tensor"]
    )


def _gives_tensors(call: Call) -> bool:
    """True if it gives a tensor that is kept, one list of tensors, or several tensors."""
    types = _result_types(call)
    several = types == ["List[Tensor]"] or (len(types) > 1 and set(types) == {"Tensor"})
    return _gives_one(call) or several


def _result_types(call: Call) -> list[str]:
    return [str(result.type) for result in call.function._schema.returns]


def _all_refs(items: Sequence[Any]) -> bool:
    return all(isinstance(item, Ref) for item in items)
