"""Run a traced step on one device: op by op, or replayed as a CUDA graph.

The ops become a flat list of functions over slots, built once. A slot holds the tensor of one
number of the traced program. Each op takes one call into PyTorch, one write to a slot, and the
clearing of slots that are not needed any more. `EagerStep` runs this list, `ReplayedStep` captures
it as a CUDA graph. If the plan uses several real devices, `PlacedStep` runs the step instead.
Optimizer updates are not included, because the user's own optimizer runs after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from hocket.base.errors import RunError, one_line
from hocket.capture.perform import BoundCall, draw_seed, seed_device
from hocket.capture.program import Call, Program
from hocket.capture.recording import Ref
from hocket.graph.graph import Graph, Phase, Role
from hocket.runtime.cpu_attention import stand_in
from hocket.runtime.device_instructions import Do, Setup
from hocket.runtime.replay import GraphReplay, Same, StaticBatch
from hocket.runtime.trace_options import Weight, starts_backward
from hocket.runtime.traced_recompute import RecomputedDraws

Slots = list[Any]
"""Tensors by number; None for absent ones."""


def performed(bound: BoundCall, call: Call, slots: Slots) -> Callable[[], None]:
    """Return a function without arguments that runs a call on slots.

    Types and number of inputs and outputs are known from the trace, so they are examined once
    instead of in each step. Small steps, such as those of recurrent networks, are thus as fast as
    plain PyTorch.
    """
    nested = [(at, bound.args[at]) for at in bound.nested]
    are_plain = all(
        type(items) is list and all(isinstance(item, Ref) for item in items) for _, items in nested
    )
    gives_one = _result_types(call) == ["Tensor"] and call.outputs != (None,)
    if bound.named or not are_plain or not (gives_one or _gives_several(call)):
        return partial(bound.perform, slots)  # type: ignore[arg-type]
    # `_op` is the C++ function that an overload calls; this skips a Python frame per op.
    function = getattr(bound.function, "_op", bound.function)
    constants, kwargs, refs, versions = bound.args, bound.kwargs, bound.refs, bound.versions
    lists = [(at, [item.number for item in items]) for at, items in nested]
    outputs = call.outputs

    def run() -> Any:
        # A copy per run: a shared list would keep the tensors alive after the call.
        args = constants.copy()
        for position, number in refs:
            args[position] = slots[number]
        for position, numbers in lists:
            args[position] = [slots[number] for number in numbers]
        return function(*args, **kwargs)

    def do() -> None:
        for output, result in zip(outputs, (run(),) if gives_one else run(), strict=True):
            if output is not None:
                slots[output] = result
        # A traced program gives a tensor a new number after each write to it.
        for before, after in versions:
            slots[after] = slots[before]

    if not gives_one or versions:
        return do
    only: Any = outputs[0]
    numbers = [number for _, number in refs]
    if kwargs or len(numbers) != len(constants) or not 1 <= len(numbers) <= 2:

        def do_one() -> None:
            slots[only] = run()

        return do_one
    # The most frequent calls have one or two tensors as their only arguments.
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return lambda: slots.__setitem__(only, function(slots[first]))
    return lambda: slots.__setitem__(only, function(slots[first], slots[last]))


def _gives_several(call: Call) -> bool:
    """True if a call returns one list of tensors, or several tensors."""
    types = _result_types(call)
    return types == ["List[Tensor]"] or (len(types) > 1 and set(types) == {"Tensor"})


def _result_types(call: Call) -> list[str]:
    if isinstance(call.function, str):
        return []
    return [str(result.type) for result in call.function._schema.returns]


Given = Sequence[Mapping[int, torch.Tensor]]
"""Tensors that exist before a step, for each device of the plan."""


class OpCalls:
    """Ops of a traced program as functions over slots, on one device."""

    def __init__(
        self, graph: Graph, program: Program, device: torch.device, seed: int | None,
        slots: Any = None,
    ) -> None:  # fmt: skip
        """Create the calls; ``slots`` holds tensors by number, in a list or a mapping.

        Without a ``seed``, random draws continue from the state of PyTorch's generator.
        """
        self.graph, self.program, self.device, self._seed = graph, program, device, seed
        self.slots: Slots = [None] * len(program.tensors) if slots is None else slots
        self.draw = 0
        """Number of the step or microbatch, from which seeds of random draws are derived."""
        self.weight: Weight = 1.0
        """Weight of the loss."""

    def bound(self, op: int, sent: Container[int] = ()) -> Callable[[], None]:
        """Return the function of an op; tensors in ``sent`` are transferred to other devices."""
        call, tensors = self.program.calls[op], self.program.tensors
        specs = [None if t is None else tensors[t] for t in call.outputs]
        function = stand_in(call, specs, self.device, sent)
        # Backward starts from a tensor of ones; scaling it scales all gradients.
        if starts_backward(self.program, call):
            function = self._weighted(call.function)
        do = performed(BoundCall(call, self.device, function), call, self.slots)
        if call.function is torch.ops.aten.as_strided.default:
            do = self._checked(do, call)
        if self._seed is not None and op in self.program.draws:
            return partial(self._seeded, do, self.program.draws[op])
        return do

    @contextmanager
    def as_traced(self) -> Iterator[None]:
        """Disable autocast, whose casts are ops of the trace, and enable gradients."""
        # As in a plain training step: some kernels save less where gradients are switched off.
        with torch.enable_grad(), torch.autocast(self.device.type, enabled=False):
            yield

    def perform(self, do: Callable[[], None], op: int, drops: Iterable[int], step: int) -> None:
        """Run an op, then clear the slots of tensors that are not needed any more."""
        try:
            do()
        # Whatever an op of a user's model raises is a failed run, not a bug of ours.
        except Exception as error:
            name = self.graph.op_names[op]
            raise RunError(f"op {name!r} failed in step {step}: {one_line(error)}") from error
        for number in drops:
            self.slots[number] = None

    def _checked(self, do: Callable[[], None], call: Call) -> Callable[[], None]:
        """Wrap `as_strided` to refuse a tensor whose strides differ from the traced ones.

        The view would silently contain wrong elements.
        """
        base, slots = call.args[0].number, self.slots
        layout = self.program.tensors[base].layout
        assert layout is not None
        traced = _strides(layout.shape, layout.stride), layout.offset

        def checked() -> None:
            tensor = slots[base]
            if (_strides(tensor.shape, tensor.stride()), tensor.storage_offset()) != traced:
                raise ValueError("a tensor has another memory layout than when it was traced")
            do()

        return checked

    def _seeded(self, do: Callable[[], None], draw: int) -> None:
        assert self._seed is not None
        seed_device(self.device, draw_seed(self._seed, self.draw, draw))
        do()

    def _weighted(self, ones_like: Any) -> Callable[..., torch.Tensor]:
        def weighted(like: torch.Tensor, **options: Any) -> torch.Tensor:
            ones: torch.Tensor = ones_like(like, **options)
            return ones.mul_(self.weight)

        return weighted


class BoundOp(NamedTuple):
    """An op as a function, and the slots to clear after it."""

    do: Callable[[], None]
    op: int
    drops: tuple[int, ...]


class EagerStep(OpCalls):
    """Forward and backward of a step on one real device."""

    def __init__(
        self,
        setup: Setup,
        device: torch.device,
        *,
        seed: int | None,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """``keep`` holds numbers of tensors to keep besides loss and gradients."""
        super().__init__(setup.graph, setup.program, device, seed)
        self._keep = keep | {*setup.program.outputs}
        self.gradients: dict[int, torch.Tensor] = {}
        """Gradients by number of the parameter, after the backward pass."""
        self.on_gradient: Callable[[int, torch.Tensor], torch.Tensor] | None = None
        """Called with a parameter and its gradient right after the gradient is computed; returns
        the tensor that replaces the gradient."""
        self._gradients_of = _gradients_of_ops(setup.program)
        self._redraws = RecomputedDraws(setup.program, device)
        ops = self._ops(setup)
        num_forward = 1 + max(
            (at for at, each in enumerate(ops)
             if setup.program.calls[each.op].phase == Phase.FORWARD),
            default=-1,
        )  # fmt: skip
        self._parts = (ops[:num_forward], ops[num_forward:])

    def forward(self, given: Given, step: int) -> None:
        """Compute the loss; ``given`` holds tensors from before the step, per device of the
        plan."""
        self.fill(given, step)
        self._run_all(self._parts[0])

    def fill(self, given: Given, step: int) -> None:
        """Fill slots with tensors that exist before the step, and clear all other slots."""
        self.forget()
        for tensors in given:
            for number, tensor in tensors.items():
                self.slots[number] = tensor
        self.draw = step

    def backward(self, weight: Weight = 1.0) -> None:
        """Compute the gradients of ``weight`` times the loss."""
        self.weight = weight
        self._run_all(self._parts[1])
        for parameter, gradient in self.program.gradients.items():
            if parameter not in self.gradients:
                self.gradients[parameter] = self.value(gradient)

    def run(self, given: Given, step: int, weight: Weight = 1.0) -> None:
        """Run forward and backward of a step."""
        self.forward(given, step)
        self.backward(weight)

    def value(self, tensor: int) -> torch.Tensor:
        """Return a kept tensor of the last step."""
        found: torch.Tensor = self.slots[tensor]
        return found

    def forget(self) -> None:
        """Drop all tensors of the step."""
        self.slots[:] = [None] * len(self.slots)
        self.gradients = {}

    def _run_all(self, ops: Sequence[BoundOp]) -> None:
        with self.as_traced():
            for do, op, drops in ops:
                self.perform(do, op, drops, self.draw)

    # ── made once ────────────────────────────────────────────────────────────────────────────

    def _ops(self, setup: Setup) -> list[BoundOp]:
        """Bind the ops in the order of the plan, without transfers between its devices.

        All devices of the plan are one real device here, so a tensor is dropped once the last of
        them drops it.
        """
        ops: list[BoundOp] = []
        dropped_after: dict[int, int] = {}
        for _, (do, number) in setup.split.sequence:
            if do == Do.RUN:
                # The user's optimizer updates the parameters after the step.
                if self.program.calls[number].phase != Phase.OPTIMIZER:
                    ops.append(BoundOp(self._bound_op(number), number, ()))
            elif do == Do.DROP and ops and not setup.split.is_kept[number]:
                dropped_after[number] = len(ops) - 1
        drops: dict[int, list[int]] = {}
        for number, at in dropped_after.items():
            if number not in self._keep:
                drops.setdefault(at, []).append(number)
        return [each._replace(drops=tuple(drops.get(at, ()))) for at, each in enumerate(ops)]

    def _bound_op(self, op: int) -> Callable[[], None]:
        do = self.bound(op)
        if self._seed is None and op in self.program.draws and self.program.repeats:
            do = partial(self._redraws.run, op, do)
        if op in self._gradients_of:
            return partial(self._announced, do, self._gradients_of[op])
        return do

    def _announced(self, do: Callable[[], None], made: Sequence[tuple[int, int, bool]]) -> None:
        """Run an op that computes gradients, and pass them to `on_gradient` if set."""
        do()
        if self.on_gradient is None:
            return
        for parameter, gradient, is_read_again in made:
            self.gradients[parameter] = self.on_gradient(parameter, self.slots[gradient])
            if not is_read_again:
                self.slots[gradient] = None


def _gradients_of_ops(program: Program) -> dict[int, list[tuple[int, int, bool]]]:
    """Return by op the gradients that it computes: (parameter, gradient, is read by another op).

    Ops of the optimizer do not count as readers.
    """
    read = {t for call in program.calls if call.phase != Phase.OPTIMIZER for t in call.reads}
    found: dict[int, list[tuple[int, int, bool]]] = {}
    for parameter, gradient in program.gradients.items():
        producer = program.tensors[gradient].producer
        if producer >= 0:
            found.setdefault(producer, []).append((parameter, gradient, gradient in read))
    return found


def _strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of dimensions with more than one element."""
    return tuple(step for extent, step in zip(shape, stride, strict=True) if extent > 1)


def kept_tensors(setup: Setup, *, everything: bool) -> frozenset[int]:
    """Return numbers of the model's outputs to keep: all of them, or only those that cost no
    memory (parameters, buffers, inputs) and single numbers."""
    returned = setup.program.returned
    found = [leaf.number for leaf in returned.leaves if hasattr(leaf, "number")] if returned else []
    specs = setup.program.tensors
    return frozenset(
        t
        for t in found
        if everything or specs[t].role != Role.ACTIVATION
        or ((layout := specs[t].layout) is not None and layout.num_elements == 1)
    )  # fmt: skip


# ── replay as one CUDA graph ─────────────────────────────────────────────────────────────────────


class _CapturedStep(NamedTuple):
    """A CUDA graph of a step, with its inputs and results."""

    graph: torch.cuda.CUDAGraph
    inputs: StaticInputs
    results: dict[int, torch.Tensor]
    gradients: dict[int, torch.Tensor]


class StaticInputs:
    """The batch of a traced step, in the memory that a CUDA graph reads."""

    def __init__(self, program: Program, given: Given) -> None:
        self._inputs = [
            [number for number in here if program.tensors[number].role == Role.INPUT]
            for here in given
        ]
        self._static = StaticBatch(self._batch_of(given))

    def _batch_of(self, given: Given) -> list[dict[int, torch.Tensor]]:
        return [
            {number: here[number] for number in numbers}
            for numbers, here in zip(self._inputs, given, strict=True)
        ]

    def within(self, given: Given) -> list[dict[int, torch.Tensor]]:
        """Return the tensors of ``given`` with the static batch in place of its batch."""
        return [{**here, **static} for here, static in zip(given, self._static.batch, strict=True)]

    def refill(self, given: Given) -> None:
        """Copy the batch of a step into the static batch."""
        self._static.refill(self._batch_of(given))


class ReplayedStep(EagerStep):
    """A step on one CUDA device, replayed if forward and backward run in one call.

    The first steps run op by op, so that libraries choose their kernels. The next one is captured,
    in the graph's own memory; later steps copy their batch into the static inputs and launch the
    graph. Random draws continue as in eager steps: the graph reads its offset from PyTorch's
    generator at each launch.
    """

    def __init__(
        self,
        setup: Setup,
        device: torch.device,
        *,
        seed: int | None,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(setup, device, seed=seed, keep=keep)
        draws = seed is not None and bool(setup.program.draws)
        self.replay: GraphReplay[_CapturedStep] = GraphReplay(
            "its draws have seeds of their own" if draws else ""
        )
        self._replayed: _CapturedStep | None = None
        """Captured step that the last step replayed, or None."""
        self._scale = torch.ones((), device=device)

    @property
    def lends(self) -> bool:
        """True if gradients are in the graph's memory, which the next replay overwrites."""
        return self.replay.captured is not None

    def forward(self, given: Given, step: int) -> None:
        """Run the forward pass op by op, even if entire steps are replayed."""
        self._replayed = None
        super().forward(given, step)

    def run(self, given: Given, step: int, weight: Weight = 1.0) -> None:
        """Run forward and backward, by replay unless `on_gradient` receives gradients one by
        one."""
        if self.on_gradient is not None:
            self._replayed = None
            super().run(given, step, weight)
            return
        self._replayed = found = self.replay.find(Same(given), lambda: self._capture(given, step))
        if found is None:
            super().run(given, step, weight)
            return
        found.inputs.refill(given)
        self._scale.fill_(weight)
        found.graph.replay()
        self.gradients = dict(found.gradients)

    def value(self, tensor: int) -> torch.Tensor:
        """Return a tensor that was kept; after a replay, a copy that the next replay does not
        overwrite."""
        if self._replayed is None:
            return super().value(tensor)
        return self._replayed.results[tensor].clone()

    def _capture(self, given: Given, step: int) -> _CapturedStep:
        inputs = StaticInputs(self.program, given)
        static = inputs.within(given)
        torch.cuda.synchronize(self.device)
        # The graph has a memory pool of its own, which cannot use blocks that are cached outside.
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                super().run(static, step, self._scale)
            results = {t: super(ReplayedStep, self).value(t) for t in self._keep}
            return _CapturedStep(graph, inputs, results, self.gradients)
        finally:
            super().forget()
