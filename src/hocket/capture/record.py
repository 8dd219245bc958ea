"""Record every op that PyTorch dispatches during a step.

A dispatch mode intercepts each op of forward, loss and backward with its tensors, real or fake. It
numbers values and storages, records producers and readers of each value, the module and cost of
each op, and pairs each backward op with the forward op of its autograd node. O(1) per op.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hocket.base.errors import HocketError
from hocket.capture.describe import OpCall, describe, draws, kind_of, signature_text
from hocket.capture.recording import (
    Constant,
    Cost,
    RawCall,
    Recording,
    Ref,
    Source,
    TensorLayout,
    Value,
    flat_results,
    has_storage,
    map_tree,
)
from hocket.graph import Phase, Role

_HIDDEN_WRITES = {
    "aten.native_batch_norm": (3, 4),
    "aten.cudnn_batch_norm": (3, 4),
    "aten.miopen_batch_norm": (3, 4),
}
"""Running statistics that batch norms update although their schemas do not declare it."""
# Position of the training flag among the arguments of batch norms.
_TRAINING_ARG = 5
_ACCUMULATE_NUMBER = 2**63
"""Minimum sequence number of AccumulateGrad nodes, which autograd runs right after the node that
has computed the gradient."""


_ITEM = torch.ops.aten._local_scalar_dense.default
_LESS = torch.ops.aten.lt.Scalar
_UNIFORM = frozenset({torch.ops.aten.rand.default, torch.ops.aten.rand.generator})
_SUMS = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor})


class _OpFacts(NamedTuple):
    """Facts from an op's schema."""

    ignored: bool
    write_args: tuple[int, ...]
    write_kwargs: tuple[str, ...]


@cache
def _facts(function: Any) -> _OpFacts:
    arguments = function._schema.arguments
    only_metadata = torch.Tag.inplace_view in function.tags
    written = [] if only_metadata else [
        (position, arg) for position, arg in enumerate(arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    ]  # fmt: skip
    return _OpFacts(
        # `set_` on a known storage creates a view of known values. cuDNN's layers use it to check
        # that their weights are in one buffer.
        ignored=str(function).startswith(("prim.", "aten.set_.source_Storage")),
        write_args=tuple(position for position, arg in written if not arg.kwarg_only),
        write_kwargs=tuple(arg.name for _, arg in written),
    )


class UntracedTensorError(Exception):
    """An op reads a tensor that is neither a source of the step nor a constant."""


class _Draws:
    """Position in the sequence of random draws of a step.

    Activation checkpointing sets the generator back, so that recompute draws the same numbers.
    """

    def __init__(self) -> None:
        self._calls: list[int] = []
        """Calls that drew new random numbers, in order."""
        self._position = 0
        self._states: dict[int, tuple[torch.Tensor, int]] = {}
        """States of the generator that the step has read, with their positions, by ``id``."""

    def note_state(self, state: torch.Tensor) -> None:
        """Record that the step has read the generator's state."""
        self._states[id(state)] = state, self._position

    def set_back(self, state: torch.Tensor) -> bool:
        """Continue from a state that the step has read; False if it has not read this state."""
        found = self._states.get(id(state))
        if found is not None:
            self._position = found[1]
        return found is not None

    def next(self, call: int) -> int:
        """Return the earlier call with the same random numbers, or ``call`` if they are new."""
        if self._position == len(self._calls):
            self._calls.append(call)
        self._position += 1
        return self._calls[self._position - 1]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that fills ``recording``. For one use."""

    def __init__(
        self,
        module_names: dict[int, str],
        originals: frozenset[int] | None = None,
    ) -> None:
        """``originals`` are storages of the user's own tensors behind the sources.

        No op may read them, because training would not update them. None if the sources are the
        user's tensors themselves.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._originals = originals
        self.recording = Recording()
        self.phase = Phase.FORWARD
        self.draws = _Draws()
        self.is_seeded = False
        """True once the step has seeded PyTorch's generator."""
        self._module_names = module_names
        self._path: list[str] = []
        self._storage_at: dict[int, int] = {}
        # A weak reference prevents the reuse of a storage's address. A strong one would change the
        # use count, by which autograd decides whether it may take over a gradient without a copy.
        self._addresses: list[StorageWeakRef] = []
        self._value_of: list[dict[TensorLayout, int]] = []
        self._forward_numbers: list[int] = []
        self._forward_calls: list[int] = []
        self._makers: dict[int, int] = {}
        """Call that made or changed the output of each autograd node, by the node's sequence
        number."""
        self._changed_by: dict[int, int] = {}
        """Last call that wrote into each storage."""
        self.calls_of: dict[int, list[int]] = {}
        """Backward calls of each autograd node, by its sequence number.

        Views and gradient sums are left out: autograd adds gradients of several uses after the node
        has freed its saved tensors.
        """
        self._signature_costs: dict[tuple[str, bool], Cost] = {}
        self.known_constants: dict[int, torch.Tensor] = {}
        """Sources that are constants, such as caches filled by an earlier run."""
        self._never: set[int | None] = set()
        """Values that are false whatever is drawn: LayerDrop compares a draw even with rate 0."""

    # ── modules ──────────────────────────────────────────────────────────────────────────────

    def enter_module(self, module: torch.nn.Module, _: Any) -> None:
        """Hook before each module's forward."""
        parent = self._path[-1] if self._path else ""
        path = self._module_names.get(id(module), parent)
        self._path.append(path)
        if self.phase == Phase.FORWARD and id(module) in self._module_names:
            self.recording.num_calls[path] += 1

    def leave_module(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        """Hook after each module's forward, also if it raised."""
        self._path.pop()

    # ── values ───────────────────────────────────────────────────────────────────────────────

    def add_source(self, name: str, role: Role, tensor: torch.Tensor) -> None:
        """Declare a tensor that exists before the step; a tensor without storage becomes a
        constant."""
        if not has_storage(tensor):
            return
        known = self.storage_of(tensor)
        layout = layout_of(tensor)
        if known is None:
            known = self._new_storage(tensor, tensor.untyped_storage().nbytes())
        elif layout in self._value_of[known]:
            return
        self.recording.sources.append(Source(name, role, self._new_value(known, layout, -1)))

    def take_unknown(self, tensor: torch.Tensor) -> None:
        """Refuse a fake tensor that is no source and that no recorded op made."""
        raise HocketError("an op reads a tensor that no recorded op made")

    def value_of(self, tensor: torch.Tensor) -> int | None:
        """Number of a tensor's value; None if the tensor was never seen."""
        storage = self.storage_of(tensor)
        return None if storage is None else self._value_of[storage].get(layout_of(tensor))

    def storage_of(self, tensor: torch.Tensor) -> int | None:
        """Number of a tensor's storage; None if the storage was never seen."""
        if not has_storage(tensor):
            return None
        return self._storage_at.get(tensor.untyped_storage()._cdata)

    def _new_storage(self, tensor: torch.Tensor, num_bytes: int = 0) -> int:
        """Register a storage, which grows with the values seen in it.

        The size of an op's result is not read from the fake tensor's storage, because a fake tensor
        from the mode's cache can have a smaller storage than the padded result of the kernel.
        """
        self.recording.storage_bytes.append(num_bytes)
        self._value_of.append({})
        self._storage_at[tensor.untyped_storage()._cdata] = len(self._value_of) - 1
        self._addresses.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
        return len(self._value_of) - 1

    def _new_value(self, storage: int, layout: TensorLayout, producer: int) -> int:
        number = len(self.recording.values)
        self.recording.values.append(Value(storage, layout))
        sizes = self.recording.storage_bytes
        sizes[storage] = max(sizes[storage], layout.end_bytes)
        self.recording.producer.append(producer)
        self._value_of[storage][layout] = number
        return number

    # ── calls ────────────────────────────────────────────────────────────────────────────────

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _facts(func).ignored:
            return func(*args, **kwargs)
        if func is _ITEM and isinstance(args[0], FakeTensor):
            if self.value_of(args[0]) in self._never:
                return False
            if (constant := self.constant_of(args[0])) is not None:
                with _disable_current_modes():
                    return constant.item()
        reads: list[int] = []
        raw_args = map_tree(args, lambda leaf: self._argument(leaf, reads))
        raw_kwargs = map_tree(kwargs, lambda leaf: self._argument(leaf, reads))
        result = func(*args, **kwargs)
        self._record(OpCall(func, args, kwargs, result), raw_args, raw_kwargs, tuple(reads))
        if func is _LESS and args[1] <= 0 and self._is_drawn(reads[0] if reads else -1):
            self._never.add(self.value_of(result))
        return result

    def constant_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Compute a fake tensor for real; None if it depends on sources or random draws.

        `nn.TransformerEncoder` reads whether its mask is causal, and models build masks from
        constants.
        """
        target, recording = self.value_of(tensor), self.recording
        if target is None:
            return None
        storage_of = [value.storage for value in recording.values]
        needed, wanted = {storage_of[target]}, []
        for call in reversed(recording.calls):
            if needed.isdisjoint(storage_of[number] for number in call.made):
                continue
            if call.draws:
                return None
            needed.update(storage_of[number] for number in call.reads)
            wanted.append(call)
        known = dict(self.known_constants)
        if any(storage_of[s.value] in needed and s.value not in known for s in recording.sources):
            return None
        value_of = lambda leaf: (  # noqa: E731
            known[leaf.number] if isinstance(leaf, Ref)
            else leaf.tensor if isinstance(leaf, Constant) else leaf
        )  # fmt: skip
        with _disable_current_modes(), torch.no_grad():
            for call in reversed(wanted):
                arguments = map_tree((call.args, call.kwargs), value_of)
                results = flat_results(call.function(*arguments[0], **arguments[1]))
                known.update(
                    (number, result)
                    for number, result in zip(call.outputs, results, strict=True)
                    if number is not None
                )
        return known.get(target)

    def _is_drawn(self, value: int) -> bool:
        """True for a result of `torch.rand`, which is never negative."""
        maker = self.recording.producer[value] if value >= 0 else -1
        return maker >= 0 and self.recording.calls[maker].function in _UNIFORM

    def _argument(self, leaf: Any, reads: list[int]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        storage = self.storage_of(leaf)
        if storage is None:
            if isinstance(leaf, FakeTensor):
                self.take_unknown(leaf)
                return self._argument(leaf, reads)
            self._require_constant(leaf)
            return Constant(leaf)
        layout = layout_of(leaf)
        number = self._value_of[storage].get(layout)
        if number is None:
            number = self._insert_view(storage, layout)
        self._remember_maker(leaf, storage, number)
        reads.append(number)
        return Ref(number)

    def _require_constant(self, tensor: torch.Tensor) -> None:
        """Refuse a tensor that is trained or belongs to the model but was not replaced by its
        source."""
        if self._originals is None:
            return
        if not has_storage(tensor):
            raise UntracedTensorError("an op reads a sparse or nested tensor")
        if tensor.untyped_storage()._cdata in self._originals:
            raise UntracedTensorError("an op reads a tensor of the model from outside the model")
        if tensor.requires_grad:
            raise UntracedTensorError(
                "an op reads a tensor that requires a gradient and is not the model's"
            )

    def _insert_view(self, storage: int, layout: TensorLayout) -> int:
        """Record a view that autograd made of a storage without dispatching an op."""
        base = next(iter(self._value_of[storage].values()))
        function = torch.ops.aten.as_strided.default
        args = (Ref(base), list(layout.shape), list(layout.stride), layout.offset)
        number = self._new_value(storage, layout, len(self.recording.calls))
        cost = Cost(kind_of(function), "", 0, 0.0, 0)
        call = RawCall(function, args, {}, (base,), (number,), (), cost, is_view=True)
        self._append(call._replace(cost=self._cost(call, OpCall(function, (), {}, None))))
        return number

    def _record(
        self, op: OpCall, args: Any, kwargs: dict[str, Any], reads: tuple[int, ...]
    ) -> None:
        """Record an op; ``args`` and ``kwargs`` have references in place of tensors."""
        recording, function = self.recording, op.function
        writes = self._written(function, args, kwargs)
        input_storages = {recording.values[number].storage for number in reads}
        outputs: list[int | None] = []
        is_new, is_fresh = bool(writes), False
        for item in flat_results(op.result):
            if not isinstance(item, torch.Tensor) or not has_storage(item):
                outputs.append(None)
                continue
            storage = self.storage_of(item)
            if storage is None or storage not in input_storages:
                made_here = storage is not None and any(
                    number is not None and recording.values[number].storage == storage
                    for number in outputs
                )
                if storage is None or not made_here:
                    storage = self._new_storage(item)
                is_fresh = True
            layout = layout_of(item)
            number = self._value_of[storage].get(layout)
            if number is None:
                number = self._new_value(storage, layout, len(recording.calls))
                is_new = True
            outputs.append(number)
        if not is_new:
            # The op returns only known values, as `detach` does, so it is not a call of the step.
            return
        call = RawCall(
            function, args, kwargs, reads, tuple(outputs), writes, Cost("", "", 0, 0.0, 0),
            draws=draws(function, op.args, op.kwargs), is_view=not writes and not is_fresh,
        )  # fmt: skip
        self._append(call._replace(cost=self._cost(call, op)))

    def _written(self, function: Any, args: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
        facts = _facts(function)
        leaves = [args[position] for position in facts.write_args if position < len(args)]
        leaves += [kwargs[name] for name in facts.write_kwargs if name in kwargs]
        hidden = _HIDDEN_WRITES.get(kind_of(function), ())
        if hidden and len(args) > _TRAINING_ARG and args[_TRAINING_ARG]:
            leaves += [args[position] for position in hidden]
        return tuple(dict.fromkeys(leaf.number for item in leaves for leaf in flat_refs(item)))

    def _cost(self, call: RawCall, op: OpCall) -> Cost:
        values = self.recording.values
        shown = map_tree((call.args, call.kwargs), lambda leaf: _layout_leaf(leaf, values))
        text = signature_text(call.function, *shown)
        key = (text, call.is_view)
        if key not in self._signature_costs:
            layouts = [
                [values[number].layout for number in dict.fromkeys(numbers)]
                for numbers in (call.reads, call.made)
            ]
            self._signature_costs[key] = describe(
                op, *layouts, is_view=call.is_view, signature=text
            )
        return self._signature_costs[key]

    def _append(self, call: RawCall) -> None:
        """Add a call to the recording, with its phase, module and partner."""
        calls, number = self.recording.calls, len(self.recording.calls)
        if call.draws:
            self._note_draw(call)
        node = self._node_number()
        partner = self._partner(node)
        if not call.is_view and call.function not in _SUMS:
            self.calls_of.setdefault(node, []).append(number)
        module = self._path[-1] if self._path else ""
        if partner >= 0:
            module = calls[partner].module
        # In the forward pass also without gradients: a custom autograd function creates its node
        # before its ops, which run without gradients.
        if self.phase == Phase.FORWARD or torch.is_grad_enabled():
            self._remember_autograd_number(partner if partner >= 0 else number)
        self._changed_by.update((self.recording.values[n].storage, number) for n in call.writes)
        calls.append(call._replace(phase=self.phase, module=module, partner=partner))

    def _note_draw(self, call: RawCall) -> None:
        """Link a call that draws random numbers again to the call that drew them first."""
        recording = self.recording
        first = self.draws.next(len(recording.calls))
        if first < len(recording.calls):
            recording.repeats[len(recording.calls)] = first
            is_same = recording.calls[first].cost.signature == call.cost.signature
            self.is_seeded |= not is_same
        if self.is_seeded:
            recording.unseen = "it sets PyTorch's generator before it draws"

    # ── pairing ──────────────────────────────────────────────────────────────────────────────

    def _remember_autograd_number(self, call: int) -> None:
        """Associate the newest autograd node with ``call``, unless an earlier call has it."""
        number = torch._C._autograd._get_sequence_nr() - 1
        if not self._forward_numbers or number > self._forward_numbers[-1]:
            self._forward_numbers.append(number)
            self._forward_calls.append(call)

    def _remember_maker(self, tensor: torch.Tensor, storage: int, value: int) -> None:
        """Associate the autograd node of a result with its call.

        Other nodes may have been created in between, where autograd clones a tensor that is about
        to be changed or refreshes a view. Views are skipped, because asking for their node may
        create one.
        """
        if self.phase != Phase.FORWARD or not tensor.requires_grad or tensor._is_view():
            return
        if (node := tensor.grad_fn) is not None:
            made = self._changed_by.get(storage, self.recording.producer[value])
            self._makers.setdefault(node._sequence_nr(), made)

    def _node_number(self) -> int:
        """Sequence number of the autograd node that is running; -1 if none is."""
        if self.phase != Phase.BACKWARD:
            return -1
        node = torch._C._current_autograd_node()
        if node is None:
            return -1
        return int(node._sequence_nr())

    def _partner(self, number: int) -> int:
        """Forward call of the autograd node with this sequence number."""
        if number < 0:
            return -1
        if number >= _ACCUMULATE_NUMBER:
            return self.recording.calls[-1].partner if self.recording.calls else -1
        # Some nodes are created after their op (writes through views), so without an exact match
        # the nearest earlier call is used.
        position = bisect_right(self._forward_numbers, number) - 1
        if position < 0 or self._forward_numbers[position] != number:
            nearest = self._forward_calls[position] if position >= 0 else -1
            return self._makers.get(number, nearest)
        return self._forward_calls[position]


def layout_of(tensor: torch.Tensor) -> TensorLayout:
    """Layout of a tensor in its storage; a tensor without storage is described as dense."""
    if not has_storage(tensor):
        shape = tuple(tensor.shape)
        stride = torch.empty(shape, device="meta").stride()
        return TensorLayout(shape, stride, 0, tensor.dtype)
    return TensorLayout(
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        (tensor.is_conj(), tensor.is_neg()),
    )


def flat_refs(tree: Any) -> list[Ref]:
    """All references in the arguments, in order."""
    found: list[Ref] = []
    map_tree(tree, lambda leaf: found.append(leaf) if isinstance(leaf, Ref) else None)
    return found


def _layout_leaf(leaf: Any, values: list[Value]) -> Any:
    if isinstance(leaf, Ref):
        return values[leaf.number].layout
    if isinstance(leaf, Constant):
        return layout_of(leaf.tensor)
    return leaf
