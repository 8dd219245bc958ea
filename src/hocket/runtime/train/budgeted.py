"""Carry steps by the model itself within a number of bytes, as a memory plan says.

Modules are visited block by block (`Visits`): what autograd saves is kept, sent to the host or made
again, parameters live on the device or come from the host, gradients leave as soon as they are
whole, and the person's optimizer updates each block where the plan says, while the backward pass
goes on. Nothing of the model changes: its modules call these visits, its parameters look at where
they are at home between steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hocket.base.errors import UsageError
from hocket.capture.fake import model_tensors
from hocket.capture.loss import ChosenLoss
from hocket.capture.model import CaptureWarning
from hocket.capture.step import apply_model
from hocket.graph.graph import Graph
from hocket.runtime.autocast import autocast_state
from hocket.runtime.memory.blocks import Block, blocks_by_module, settle_parameters
from hocket.runtime.memory.copies import CopyEngines, HostPool, Lent
from hocket.runtime.memory.experts import called_in_groups
from hocket.runtime.memory.groups import ring_of, sources_of
from hocket.runtime.memory.home_step import step_at_home
from hocket.runtime.memory.landing import Gradients, Landings, put_aside_gradients
from hocket.runtime.memory.logits import lazy_logits
from hocket.runtime.memory.part_steps import PartSteps
from hocket.runtime.memory.parts import find_head, group_experts, model_blocks
from hocket.runtime.memory.set_aside import SetAside
from hocket.runtime.memory.slots import slots_of
from hocket.runtime.memory.updates import HostUpdates, updates_in_parts
from hocket.runtime.memory.visiting import Visitors
from hocket.runtime.memory.visits import Visits
from hocket.runtime.strategy import StepOutput, Timings
from hocket.runtime.train.batches import on_device, signature_of, strayed, unforeseen
from hocket.runtime.train.called import detached
from hocket.runtime.train.fitting import KeptBudget
from hocket.runtime.train.forwards import (
    carried_later,
    carry,
    put_forward,
    take_away,
    unless_traced,
)
from hocket.runtime.train.generation import without_cache
from hocket.runtime.train.homes import ModelTree, replaced_error
from hocket.runtime.train.recorded import Recipe, in_mode
from hocket.runtime.train.repeats import AS_ASKED
from hocket.runtime.train.replayed_budget import ReplayedBudget
from hocket.runtime.train.returned import single_number
from hocket.runtime.train.unrehearsed import FirstSteps
from hocket.runtime.train.waiting_states import WaitingStates
from hocket.runtime.train.weight import Weight


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
