"""Carry steps by the model itself within a number of bytes, as a memory plan says.

Modules are visited block by block (`Visits`): what autograd saves is kept, sent to the host or made
again, parameters live on the device or come from the host, gradients leave as soon as they are
whole, and the person's optimizer updates each block where the plan says, while the backward pass
goes on. Nothing of the model changes: its modules call these visits, its parameters look at where
they are at home between steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from hocket.base.errors import UsageError
from hocket.base.units import format_apart, typed_bytes
from hocket.capture.fake import model_tensors, plain_batch
from hocket.capture.loss import ChosenLoss
from hocket.capture.model import CaptureWarning
from hocket.capture.step import apply_model
from hocket.graph.graph import Graph
from hocket.runtime.autocast import autocast_state
from hocket.runtime.collectives.gradient_reducer import GradientReducer
from hocket.runtime.offload.allocator import context_bytes
from hocket.runtime.offload.budget_graph import ReplayedBudget
from hocket.runtime.offload.chunked_loss import lazy_logits
from hocket.runtime.offload.copy_streams import CopyEngines, HostPool, Lent
from hocket.runtime.offload.expert_groups import called_in_groups, ring_of, sources_of
from hocket.runtime.offload.gradient_buffers import Gradients, Landings, put_aside_gradients
from hocket.runtime.offload.hooks import Visits
from hocket.runtime.offload.host_optimizer import HostUpdates, PartSteps, step_at_home
from hocket.runtime.offload.memory_tracker import Ledger
from hocket.runtime.offload.model_blocks import find_head, group_experts, model_blocks
from hocket.runtime.offload.optimizer_parts import updates_in_parts
from hocket.runtime.offload.parameter_blocks import Block, blocks_by_module, settle_parameters
from hocket.runtime.offload.patched_forward import (
    carried_later,
    carry,
    put_forward,
    take_away,
    unless_traced,
)
from hocket.runtime.offload.plan_choice import KeptBudget
from hocket.runtime.offload.prefetch import slots_of
from hocket.runtime.offload.state_swap import Visitors
from hocket.runtime.strategy import StepOutput, Timings
from hocket.runtime.train.batches import on_device, signature_of, strayed, unforeseen
from hocket.runtime.train.cuda_graphs import AS_ASKED
from hocket.runtime.train.eager_model import detached
from hocket.runtime.train.loss_weight import Weight
from hocket.runtime.train.model_tensors import ModelTree, replaced_error
from hocket.runtime.train.trace_options import Recipe, in_mode

# A training that has left its model to another one: the device gets its room back meanwhile.
#
# Tensors stay as they are, views of them as well; only their storages are empty until the training
# comes back. What is rehearsed, or trained, in between finds as much room as if it were the first.


class SetAside:
    """Blocks whose parameters are the person's alone, and room that is given back."""

    def __init__(
        self, blocks: Sequence[Block], rooms: Iterable[torch.Tensor], engines: CopyEngines
    ) -> None:
        """Nothing is under way on the host for these blocks."""
        self._blocks, self._engines = blocks, engines
        for block in blocks:
            for parameter in block.parameters if block.home is not None else ():
                # At home they lie in one tensor; a model's own parameters have each its memory.
                parameter.data = parameter.data.clone()
        # Copies that were asked for ahead may still write.
        engines.synchronize()
        storages = {room.untyped_storage()._cdata: room.untyped_storage() for room in rooms}
        self._sizes = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self._sizes:
            storage.resize_(0)

    def take_back(self) -> None:
        """Have the room again, and the parameters as they are now where their blocks want them."""
        for storage, num_bytes in self._sizes:
            storage.resize_(num_bytes)
        # The computation may still be at work in memory that it has given back.
        self._engines.synchronize()
        for block in self._blocks:
            block.take_home()
            for parameter in block.parameters if block.home is None else ():
                parameter.data = parameter.data.to(self._engines.device)


# State dicts that wait for asynchronous updates, which run on after a step has returned.
#
# ``model.state_dict()`` and ``optimizer.state_dict()``, and what is loaded into them, wait for
# these as ``train.state_dict()`` does; so does a copy of the model.


class _WaitingHook:
    """A hook that waits."""

    # Hooks are wrapped with all that they have: a copy of the model would have its strategy.
    __slots__ = ("_wait",)

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def __call__(self, *_: object) -> None:
        """Whatever is saved or loaded."""
        self._wait()

    def __deepcopy__(self, memo: object) -> _WaitingHook:
        """The copy of a model has nothing to wait for. Modules are copied after hooks."""
        self._wait()
        return _WaitingHook(_nothing)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """A file of the whole model would need hocket to be read."""
        raise UsageError(
            "a model with async_update=True cannot be pickled as a whole",
            hint="save model.state_dict(), or copy.deepcopy(model); or leave async_update out",
        )


def _nothing() -> None:
    """There is nothing to wait for."""


class WaitingStates:
    """Where it is waited, for as long as a strategy has the model."""

    def __init__(self, wait: Callable[[], None], *, is_idle: bool) -> None:
        self._is_idle = is_idle
        self._hook = _WaitingHook(wait)
        self._handles: dict[object, list[RemovableHandle]] = {}

    def of(self, owner: nn.Module | torch.optim.Optimizer) -> None:
        """State dicts of it wait from here on."""
        if owner not in self._handles and not self._is_idle:
            self._handles[owner] = [
                owner.register_state_dict_pre_hook(self._hook),
                owner.register_load_state_dict_pre_hook(self._hook),
            ]

    def leave(self) -> None:
        """They wait no more."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()


# What models keep for generating words, which is no part of training.
#
# Keys and values of attention in a cache are copies that no gradient needs, and a part that is
# computed again would add them once more.


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Models of Hugging Face whose configuration asks for a cache go without, as they were then."""
    # Encoders and decoders may have configurations of their own.
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    caching: list[Any] = [each for each in found.values() if getattr(each, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


# What a step keeps of what a model returns.


def single_number(value: Any) -> Any:
    """A single number or a word without what its gradient needs; None for all else.

    Caches among what a model returns hold the whole graph.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach()
    return value if isinstance(value, int | float | str) else None


# What the first steps of a model hold that could not be rehearsed.
#
# Such a model is trained as lean as it can be, and nobody knows before whether that keeps its
# budget. So two steps are counted as they run, the second with all that the optimizer keeps, and
# where they hold more than the budget a person is told how much.


_NUM_COUNTED = 2


class BudgetExceededWarning(UserWarning):
    """Steps of a model that could not be rehearsed hold more than their budget."""


class FirstSteps:
    """Counts the first steps of a training."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._device = name, device
        self._num_left = _NUM_COUNTED
        self._peak_bytes = 0

    @contextmanager
    def counted(
        self, kept: KeptBudget, lasting: Callable[[], Iterable[torch.Tensor]], batch: Any
    ) -> Iterator[None]:
        """Around a step; ``lasting`` is what is on the device besides its batch."""
        if kept.peak_bytes is not None or not self._num_left:
            yield
            return
        there = [leaf for leaf in tree_leaves(plain_batch(batch)) if isinstance(leaf, torch.Tensor)]
        with self._counting([*lasting(), *there]):
            yield
        self._num_left -= 1
        if not self._num_left and self._peak_bytes > kept.section.budget_bytes[0]:
            held, allowed = format_apart(self._peak_bytes, kept.section.budget_bytes[0])
            warnings.warn(
                f"steps of {self._name} hold {held}, and the budget is {allowed}: it could not be "
                f'rehearsed, and is trained as lean as it can be; give it memory="'
                f'{typed_bytes(self._peak_bytes)}", or make the batch smaller',
                BudgetExceededWarning,
                6,
            )

    @contextmanager
    def _counting(self, lasting: Iterable[torch.Tensor]) -> Iterator[None]:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            peak_bytes = torch.cuda.max_memory_reserved(self._device) + context_bytes(self._device)
        else:
            ledger = Ledger()
            ledger.hold(lasting)
            with ledger:
                yield
            peak_bytes = ledger.peak_bytes
        self._peak_bytes = max(self._peak_bytes, peak_bytes)


# Carry steps by the model itself within a number of bytes, as a memory plan says.
#
# Modules are visited block by block (`Visits`): what autograd saves is kept, sent to the host or
# made again, parameters live on the device or come from the host, gradients leave as soon as they
# are whole, and the person's optimizer updates each block where the plan says, while the backward
# pass goes on. Nothing of the model changes: its modules call these visits, its parameters look at
# where they are at home between steps.


class Budgeted:
    """A model within a budget; see `Strategy`."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        recipe: Recipe,
        kept: KeptBudget,
        device: torch.device,
        *,
        graph: Graph | None = None,
        rounded: Mapping[str, torch.dtype] | None = None,
        is_rehearsal: bool = False,
        outputs: bool = False,
        lost: str = "",
        called: str = AS_ASKED,
    ) -> None:
        """``rounded`` are parameters that every op reads in another type only, by name; ``called``
        says why steps are not replayed as a whole, and is empty where they are; with ``outputs``
        all that the model returns is there after a step.

        In a rehearsal tensors are fake, and nothing is done on the host.
        """
        memory = kept.section
        self._model, self._recipe, self.kept, self._memory = model, recipe, kept, memory
        self.predicted_s, self.lost = kept.step_s, lost
        self._rehearsed = signature_of(batch)
        self._rounds_for = autocast_state() if rounded else ()
        self._loss, self._outputs = ChosenLoss(recipe.loss), outputs
        if outputs and memory.loss_chunks > 1:
            raise UsageError(
                "outputs=True, but the memory plan computes logits and loss in chunks",
                hint="leave outputs=True out, or plan with loss_chunks 1",
            )
        is_real = device.type == "cuda" and not is_rehearsal
        self._engines = CopyEngines(device, is_real=is_real, is_idle=is_rehearsal)
        self.blocks = model_blocks(model, memory, graph)
        group_experts(model, self.blocks, memory, graph)
        self._pool = HostPool(pinned=is_real)
        self._updates = HostUpdates(is_idle=is_rehearsal)
        self._steps = PartSteps(device, is_real=is_real, is_rehearsal=is_rehearsal)
        self._optimizer: torch.optim.Optimizer | None = None
        """Whose updates are done as gradients come."""
        self._is_own_loop = False
        self._aside: SetAside | None = None
        self._landings = Landings(self._engines, self._pool, self._updates)
        self._used = Lent()
        """Gradients that updates on the device read."""
        settle_parameters(model, self.blocks, self._engines, rounded or {})
        self._slots = slots_of(self.blocks, self._engines, memory.prefetch)
        self._ring = ring_of(self.blocks, self._engines)
        own = CopyEngines(device, is_real=is_real, is_idle=is_rehearsal)
        self._visitors = Visitors(self.blocks, own, self._steps.step_here)
        stays = frozenset(tensor.untyped_storage()._cdata for tensor in self.lasting)
        self._visits = Visits(
            self._engines, self._slots, self._pool, self._updates, stays,
            any(block.sends for block in self.blocks), memory.prefetch, not is_rehearsal,
            partial(put_aside_gradients, self.blocks), self._begin_block, self._finish_block,
            self._finish_step, lambda: self._lose(strayed(recipe.name)),
        )  # fmt: skip
        self._head = find_head(model, memory, graph, self.blocks)
        # Where updates are finished when a step returns, nobody has to wait.
        self._states = WaitingStates(self._settle, is_idle=is_rehearsal or not memory.async_update)
        self._is_rehearsal = is_rehearsal
        self._put_visits()
        self._replayed = ReplayedBudget(model, device, called)
        self._first_steps = FirstSteps(recipe.name, device)
        self.tensors: Mapping[str, torch.Tensor] = {n: t for n, _, t in model_tensors(model)}
        self._tree = ModelTree(model, everything=False)

    # ── a step ───────────────────────────────────────────────────────────────────────────────

    def expect(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Blocks are updated as their gradients come."""
        self._steps.settle(optimizer, self.blocks)
        self._optimizer = optimizer if optimizer and updates_in_parts(optimizer) else None

    def feed(self, reducer: GradientReducer) -> None:
        """Leave gradients in ``parameter.grad``, where the reducer finds them after the pass.

        Autograd's hooks would give it gradients before they have left the device.
        """

    @property
    def replays(self) -> str:
        """How steps are launched; see `TellsReplay`."""
        return self._replayed.repeats.told

    def train(self, batch: Any, step: int, weight: Weight) -> StepOutput:
        """Forward and backward, and updates that are expected."""
        self._require_model()
        self._notice_shapes(batch)
        with self._first_steps.counted(self.kept, lambda: self.lasting, batch):
            carried = self._replayed(batch, weight, self._optimizer, self._passes)
        if self._optimizer is None and not self._memory.async_update:
            # Accumulated gradients are there to be read, as `parameter.grad`.
            self._settle()
        return carried

    def _passes(self, batch: Any, weight: Weight) -> StepOutput:
        loss, outputs = self._forward(batch)
        # Logits that nobody asks for again are not held through the backward pass.
        outputs = detached(outputs) if self._outputs else tree_map(single_number, outputs)
        loss.backward(torch.ones_like(loss).mul_(weight))  # type: ignore[no-untyped-call]
        return StepOutput(loss.detach(), outputs)

    def timed(self, batch: Any, step: int, weight: Weight) -> tuple[StepOutput, Timings | None]:
        """Ops are not timed."""
        return self.train(batch, step, weight), None

    def forward(self, batch: Any, step: int) -> StepOutput:
        """The model itself; gradients are at home after the backward pass."""
        self._optimizer = None
        self._begin(batch)
        outcome = self._forward(batch)
        self._is_own_loop = True
        return outcome

    def _begin(self, batch: Any) -> None:
        """Something else than a step of training follows."""
        self._require_model()
        self._notice_shapes(batch)
        self._replayed.let_go()

    def _forward(self, batch: Any) -> StepOutput:
        self._is_own_loop = False
        here = self._entered(batch)
        self._visitors.forget()
        with self._visits.outside():
            returned = self._apply(here)
            loss = self._loss(returned)
        if loss.requires_grad:
            loss.register_hook(lambda _: self._visits.end_forward())  # type: ignore[no-untyped-call]
        return StepOutput(loss, returned)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of the optimizer, as far as it was not done as gradients came."""
        # Schedulers look whether it was called.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        self._states.of(optimizer)
        if not updates_in_parts(optimizer):
            self._settle()
            self._steps.step_whole(optimizer)
        elif self._optimizer is None:
            self._update_all(optimizer)
        if not self._memory.async_update:
            self._settle()

    def _update_all(self, optimizer: torch.optim.Optimizer) -> None:
        self._steps.settle(optimizer, self.blocks)
        here: list[nn.Parameter] = []
        for block in self.blocks:
            if block.home is None:
                here += block.parameters
                continue
            self._wait(block)
            gradients = {p: p.grad for p in block.parameters if p.grad is not None}
            for parameter in gradients:
                parameter.grad = None
            block.pending = block.pending | gradients
            self._updates.ask(
                block, partial(self._update, block, self._steps.at_home(optimizer, block))
            )
        self._steps.step_here(self._steps.here(optimizer, here))

    def clip(self, max_norm: float) -> None:
        """By the norm of all gradients, wherever they are."""
        self._settle()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def gather(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait for updates that are under way; what was never updated has no state."""
        self._require_model()
        self._settle()
        for parameter in [p for p, state in optimizer.state.items() if not state]:
            del optimizer.state[parameter]

    def evaluate(self, batch: Any) -> StepOutput:
        """The loss, without gradients."""
        self._begin(batch)
        with torch.no_grad(), in_mode(self._model, is_training=False):
            carried = self._forward(batch)
        self._look_home()
        return carried

    def predict(self, batch: Any) -> Any:
        """What the model returns."""
        self._require_model()
        self._replayed.let_go()
        with torch.no_grad(), in_mode(self._model, is_training=False):
            returned = self._apply(self._entered(batch))
        self._look_home()
        return returned

    def _look_home(self) -> None:
        """What a person does to parameters between steps they do to the home."""
        for block in self.blocks:
            block.look_home()

    def _apply(self, here: Any) -> Any:
        with without_cache(self._model) if torch.is_grad_enabled() else nullcontext():
            return (self._recipe.forward or apply_model)(self._model, here)

    def leave(self) -> None:
        """Have the model be as it was, for another strategy; this one trains no more."""
        self._settle()
        self._replayed.let_go()
        self._slots.forget_all()
        self._aside = SetAside(self.blocks, [*self._rooms, *self._visitors.buffers], self._engines)
        self._take_away()

    def come_back(self) -> None:
        """Have the model again, as another strategy that was refused has left it."""
        assert self._aside is not None
        self._take_away()
        self._aside.take_back()
        self._steps.forget()
        self._put_visits()
        self._aside = None

    def _take_away(self) -> None:
        take_away(module for block in self.blocks for module in block.modules.values())
        carry(self._model, None)
        self._states.leave()

    def _require_model(self) -> None:
        if self._aside is not None:
            raise carried_later()
        if not self._tree.is_same():
            raise replaced_error()
        if self._rounds_for and autocast_state() != self._rounds_for:
            raise UsageError(
                "parameters have low-precision copies for the autocast that hocket.prepare was "
                "called under, and this call is not under it",
                hint="call hocket.prepare outside of autocast, or steps inside of the same",
            )

    # ── gradients and updates ────────────────────────────────────────────────────────────────

    def _begin_block(self, block: Block) -> None:
        """The gradients of a block are about to be whole."""
        self._visitors.invite(block, self._optimizer)

    def _finish_block(self, block: Block) -> None:
        """The gradients of a block are whole: update it, or send them home."""
        if block.home is None:
            if self._optimizer is not None:
                self._update_here(block)
            return
        found = {p: p.grad for p in block.parameters if p.grad is not None}
        if not found and not block.arrived:
            return
        for parameter in found:
            parameter.grad = None
        block.look_home()
        update = self._visitors.update(block, self._optimizer, found)
        if update is not None:
            self._used.lend(list(found.values()), update.changed)
            block.returned = update.returned
            self._slots.forget(block)
            return
        part = None if self._optimizer is None else self._steps.at_home(self._optimizer, block)
        landing, landed = self._landings.send(block, found, is_used=part is not None)
        self._updates.ask(block, partial(self._land, block, landing, landed, part), block.sent)
        self._slots.forget(block)

    def _land(
        self, block: Block, landing: torch.Tensor, gradients: Gradients,
        part: torch.optim.Optimizer | None,
    ) -> Iterator[None]:  # fmt: skip
        """On the host: add what has come to what is there, and update if that is all."""
        self._landings.add(block, landing, gradients)
        if part is not None:
            yield from self._update(block, part)

    def _update(self, block: Block, part: torch.optim.Optimizer) -> Iterator[None]:
        """On the host: one step of a block."""
        block.is_stale = True
        with self._landings.used(block):
            yield from step_at_home(block, part)

    def _update_here(self, block: Block) -> None:
        assert self._optimizer is not None
        if any(p.grad is not None for p in block.parameters):
            self._steps.step_here(self._steps.here(self._optimizer, block.parameters))
            for parameter in block.parameters:
                parameter.grad = None

    def make_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the states that come to or stay on the device, as after a first step."""
        if not optimizer.state:
            self._steps.make_states(optimizer, self.blocks)
        self._visitors.prepare(optimizer)

    def _finish_step(self) -> None:
        self._finish_block(self.blocks[-1])
        self._landings.sent.take_back()
        self._used.take_back()
        if self._is_own_loop:
            self._settle()

    def _settle(self) -> None:
        """Have parameters and gradients at home, with nothing under way."""
        for block in self.blocks:
            self._wait(block)
            block.require_own_memory()
            block.look_home()
            for parameter, gradient in block.pending.items():
                parameter.grad = gradient
            block.pending = {}

    def _wait(self, block: Block) -> None:
        """Until a block is at home with all updates done."""
        self._updates.wait(block)
        block.returned.synchronize()

    # ── setting up ───────────────────────────────────────────────────────────────────────────

    @property
    def _rooms(self) -> list[torch.Tensor]:
        """Room on the device that what is at home on the host has there."""
        residents = [block.resident for block in self.blocks if block.resident is not None]
        return [*self._slots.buffers, *self._ring.buffers, *residents]

    @property
    def lasting(self) -> list[torch.Tensor]:
        """What stays on the device between steps, but for the optimizer's state."""
        lasting = [*self._model.buffers(), *self._rooms]
        for block in self.blocks:
            lasting += block.parameters if block.home is None else ()
            if block.policy.activations == "recomputed":
                lasting += block.unmoved.spares()
        return lasting

    def _entered(self, batch: Any) -> Any:
        """The batch on the device, where nothing is left of a backward pass that failed and what no
        block has alone is there for all."""
        here = on_device(batch, self._engines.device)
        if self._visits.is_cut_off:
            self._landings.drop(self.blocks)
        self._visits.begin(here)
        shared = self.blocks[-1]
        if shared.home is not None:
            self._visits.bring_shared(shared)
        return here

    def _put_visits(self) -> None:
        self._states.of(self._model)
        carry(self._model, self)
        ring, deliver = self._ring, self._landings.send_group
        sources = {block: sources_of(block, ring, deliver) for block in self.blocks}
        for path, blocks in blocks_by_module(self.blocks).items():
            block, module = blocks[-1], blocks[-1].modules[path]
            own, grouped = module.forward, sources[block]
            forward = called_in_groups(grouped, own) if grouped else own
            if module is self._head:
                call = partial(self._lazy, block, forward, module)
            else:
                call = partial(self._visit, path, blocks, forward)
            put_forward(module, self, call if self._is_rehearsal else unless_traced(own, call))

    def _visit(
        self, path: str, blocks: list[Block], forward: Any, *args: Any, **kwargs: Any
    ) -> Any:
        block = self._visits.next_of(path, blocks)
        return self._visits.visit(block, forward, args, kwargs, runs_again=path not in block.once)

    def _lazy(self, block: Block, forward: Any, head: nn.Linear, rows: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            return self._visits.visit(block, forward, (rows,), {})
        return lazy_logits(
            rows, forward, head, lambda function: self._visits.visit(block, function, (), {}),
            self._memory.loss_chunks,
        )  # fmt: skip

    def _notice_shapes(self, batch: Any) -> None:
        self._lose(unforeseen(self._rehearsed, signature_of(batch)))

    def _lose(self, what: str) -> None:
        if what and not self.lost:
            self.lost = what
            warnings.warn(what, CaptureWarning, 2)
