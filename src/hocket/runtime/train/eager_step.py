"""Run a traced step on the user's own tensors, with as little overhead per op as possible.

Where all devices of the plan are one real device, the instructions become a flat list of functions
over slots, made once: per op one call into PyTorch, one write, and the drops after it. What crosses
between devices of the plan is copied as it would be. Several real devices are driven by
streams and events (`SingleProcess`). Updates are not part of it: where the plan updates a
parameter, its gradient is handed to the user's own optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from hocket.base.errors import RunError, one_line
from hocket.capture.perform import BoundCall, draw_seed, seed_device
from hocket.capture.program import Call, Program
from hocket.capture.recording import Ref
from hocket.graph.graph import Phase, Role
from hocket.runtime.cpu_attention import stand_in
from hocket.runtime.device_instructions import Do
from hocket.runtime.placed_program import Setup
from hocket.runtime.tensor_bytes import pack, unpack
from hocket.runtime.train.loss_weight import Weight, starts_backward
from hocket.runtime.train.traced_recompute import RecomputedDraws

# A recorded call as a function without arguments, with as little in between as possible.
#
# What a call takes and gives is known when it is recorded, so that the questions which a general
# form asks each time (is this a tensor, a list of tensors, something written to) are asked once.
# Small steps, such as those of recurrent networks, are as quick as plain PyTorch by that.


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


# Run a traced step on the user's own tensors, with as little overhead per op as possible.
#
# Where all devices of the plan are one real device, the instructions become a flat list of
# functions over slots, made once: per op one call into PyTorch, one write, and the drops after it.
# What crosses between devices of the plan is copied as it would be. Several real devices are driven
# by streams and events (`SingleProcess`). Updates are not part of it: where the plan updates a
# parameter, its gradient is handed to the user's own optimizer.


Given = Sequence[Mapping[int, torch.Tensor]]
"""Tensors that are there before a step, per device of the plan."""


_NUM_MOVES = 100
"""Approximate number of progress reports per step."""


class _Act(NamedTuple):
    """One thing to do, and the slots that are free after it."""

    do: Callable[[], None]
    op: int
    """-1 for transfers."""
    slots: Slots
    drops: tuple[int, ...]


class EagerStep:
    """The forward and backward of a step on one real device."""

    def __init__(
        self,
        setup: Setup,
        device: torch.device,
        *,
        seed: int | None,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """``keep`` are tensors to hold beside loss and gradients; ``seed`` is as in `prepare`."""
        self.setup, self.device, self._seed = setup, device, seed
        num_tensors = len(setup.program.tensors)
        self._slots: list[Slots] = [[None] * num_tensors for _ in range(setup.split.num_devices)]
        self._keep = keep | {*setup.program.outputs}
        self._step = 0
        self._weight: Weight = 1.0
        self._moving: dict[int, torch.Tensor] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        """By parameter, after the backward part."""
        self.on_gradient: Callable[[int, torch.Tensor], torch.Tensor] | None = None
        """Called with a parameter and its gradient when the op that makes it has run; returns the
        tensor that the gradient is then."""
        self._gradients_of = _gradients_of_ops(setup.program)
        self.on_move: Callable[[float], None] | None = None
        """Called now and then with the part of the step that is done."""
        self._redraws = RecomputedDraws(setup.program, device)
        acts = self._acts()
        num_forward = 1 + max(
            (at for at, act in enumerate(acts)
             if act.op >= 0 and setup.program.calls[act.op].phase == Phase.FORWARD),
            default=-1,
        )  # fmt: skip
        self._parts = (acts[:num_forward], acts[num_forward:])

    def forward(self, given: Given, step: int) -> None:
        """Compute all up to the loss from the tensors that are there before, per device."""
        self.fill(given, step)
        self._run_all(self._parts[0])

    def fill(self, given: Given, step: int) -> None:
        """Take the tensors that are there before a step, per device, and nothing else."""
        for slots, tensors in zip(self._slots, given, strict=True):
            slots[:] = [None] * len(slots)
            for number, tensor in tensors.items():
                slots[number] = tensor
        self.gradients, self._step = {}, step
        self._moving.clear()

    def backward(self, weight: Weight = 1.0) -> None:
        """Compute the gradients of ``weight`` times the loss."""
        self._weight = weight
        self._run_all(self._parts[1])
        for parameter, gradient in self.setup.program.gradients.items():
            if parameter not in self.gradients:
                self.gradients[parameter] = self.value(gradient)

    def run(self, given: Given, step: int, weight: Weight = 1.0) -> None:
        """The whole step at once."""
        self.forward(given, step)
        self.backward(weight)

    def value(self, tensor: int) -> torch.Tensor:
        """A tensor that was kept."""
        found: torch.Tensor = next(s[tensor] for s in self._slots if s[tensor] is not None)
        return found

    def forget(self) -> None:
        """Drop all that the step held."""
        for slots in self._slots:
            slots[:] = [None] * len(slots)
        self.gradients = {}

    def _run_all(self, acts: Sequence[_Act]) -> None:
        with self.as_recorded():
            if self.on_move is None:
                for act in acts:
                    self._perform(act)
                return
            total = sum(map(len, self._parts))
            first = 0 if acts is self._parts[0] else len(self._parts[0])
            for index, act in enumerate(acts, first):
                if index % max(1, total // _NUM_MOVES) == 0:
                    self.on_move(index / total)
                self._perform(act)

    @contextmanager
    def as_recorded(self) -> Iterator[None]:
        """The state of PyTorch in which calls mean what they meant when they were recorded."""
        # As in a plain training step: some kernels save less where gradients are switched off.
        with torch.enable_grad(), torch.autocast(self.device.type, enabled=False):
            yield

    def _perform(self, act: _Act) -> None:
        do, op, slots, drops = act
        try:
            do()
        # Whatever an op of a stranger's model raises is a failed run, not a bug of ours.
        except Exception as error:
            raise self._failure(op, error) from error
        for number in drops:
            slots[number] = None

    def _failure(self, op: int, error: Exception) -> RunError:
        name = self.setup.graph.op_names[op] if op >= 0 else "a transfer"
        return RunError(f"op {name!r} failed in step {self._step}: {one_line(error)}")

    # ── made once ────────────────────────────────────────────────────────────────────────────

    def _acts(self) -> list[_Act]:
        acts: list[_Act] = []
        last: dict[int, int] = {}
        for device, (do, number) in self.setup.split.sequence:
            slots = self._slots[device]
            if do == Do.DROP:
                # Only acts of the same device look at its slots, so the last of them may drop.
                if number not in self._keep and device in last:
                    act = acts[last[device]]
                    acts[last[device]] = act._replace(drops=(*act.drops, number))
                continue
            if do == Do.RUN:
                acts.append(_Act(self._run(number, slots), number, slots, ()))
            elif do == Do.SEND:
                acts.append(_Act(partial(self._send, number), -1, slots, ()))
            elif do == Do.WAIT:
                acts.append(_Act(partial(self._receive, number), -1, slots, ()))
            else:
                continue
            last[device] = len(acts) - 1
        return acts

    def _run(self, op: int, slots: Slots) -> Callable[[], None]:
        call = self.setup.program.calls[op]
        if call.phase == Phase.OPTIMIZER:
            return partial(self._hand_out, call.args[0].number, call.args[1].number, slots)
        specs = [None if t is None else self.setup.program.tensors[t] for t in call.outputs]
        function = stand_in(call, specs, self.device, self.setup.sent)
        if starts_backward(self.setup.program, call):
            function = self._weighted(call.function)
        do = performed(BoundCall(call, self.device, function), call, slots)
        if call.function is torch.ops.aten.as_strided.default:
            do = self._checked(do, call, slots)
        if self._seed is not None and op in self.setup.program.draws:
            do = partial(self._seeded, do, self.setup.program.draws[op])
        elif op in self.setup.program.draws and self.setup.program.repeats:
            do = partial(self._redraws.run, op, do)
        if op in self._gradients_of:
            return partial(self._announced, do, self._gradients_of[op], slots)
        return do

    def _announced(
        self, do: Callable[[], None], made: Sequence[tuple[int, int, bool]], slots: Slots
    ) -> None:
        """Run an op that makes gradients, and hand them over at once where someone takes them."""
        do()
        if self.on_gradient is None:
            return
        for parameter, gradient, is_read_again in made:
            self.gradients[parameter] = self.on_gradient(parameter, slots[gradient])
            if not is_read_again:
                slots[gradient] = None

    def _checked(self, do: Callable[[], None], call: Call, slots: Slots) -> Callable[[], None]:
        """A view by strides, which says nothing where the real tensor has others than traced."""
        base = call.args[0].number
        layout = self.setup.program.tensors[base].layout
        assert layout is not None
        traced = _strides(layout.shape, layout.stride), layout.offset

        def checked() -> None:
            tensor = slots[base]
            if (_strides(tensor.shape, tensor.stride()), tensor.storage_offset()) != traced:
                raise ValueError("a tensor lies in memory otherwise than it was traced")
            do()

        return checked

    def _hand_out(self, parameter: int, gradient: int, slots: Slots) -> None:
        if parameter not in self.gradients:
            self.gradients[parameter] = slots[gradient]

    def _seeded(self, do: Callable[[], None], draw: int) -> None:
        assert self._seed is not None
        seed_device(self.device, draw_seed(self._seed, self._step, draw))
        do()

    def _weighted(self, ones_like: Any) -> Callable[..., torch.Tensor]:
        def weighted(like: torch.Tensor, **options: Any) -> torch.Tensor:
            ones: torch.Tensor = ones_like(like, **options)
            return ones.mul_(self._weight)

        return weighted

    def _send(self, number: int) -> None:
        tensor, src, _ = self.setup.split.transfers[number]
        spec = self.setup.program.tensors[tensor]
        if spec.layout is not None:
            packed = pack(self._slots[src][tensor], spec, self.setup.is_whole[number])
            self._moving[number] = packed.clone()

    def _receive(self, number: int) -> None:
        tensor, _, dst = self.setup.split.transfers[number]
        spec = self.setup.program.tensors[tensor]
        if spec.layout is not None:
            data = self._moving.pop(number)
            self._slots[dst][tensor] = unpack(data, spec, self.setup.is_whole[number])


def _gradients_of_ops(program: Program) -> dict[int, list[tuple[int, int, bool]]]:
    """By op: the parameters whose gradients it makes, these gradients, and whether ops read them.

    The optimizer's ops do not count as readers.
    """
    read = {t for call in program.calls if call.phase != Phase.OPTIMIZER for t in call.reads}
    found: dict[int, list[tuple[int, int, bool]]] = {}
    for parameter, gradient in program.gradients.items():
        producer = program.tensors[gradient].producer
        if producer >= 0:
            found.setdefault(producer, []).append((parameter, gradient, gradient in read))
    return found


def _strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Those that matter."""
    return tuple(step for extent, step in zip(shape, stride, strict=True) if extent > 1)


def kept_tensors(setup: Setup, *, everything: bool) -> frozenset[int]:
    """Tensors that the model returned: all, or single numbers only, such as a loss and metrics."""
    returned = setup.program.returned
    found = [leaf.number for leaf in returned.leaves if hasattr(leaf, "number")] if returned else []
    specs = setup.program.tensors
    return frozenset(
        t
        for t in found
        if everything or specs[t].role != Role.ACTIVATION or _is_single(specs[t].layout)
    )


def _is_single(layout: Any) -> bool:
    return layout is not None and layout.num_elements == 1
