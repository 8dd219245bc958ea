"""A training step of a model block by block, with what each block's policy wants done around it.

Each block's module is visited in the forward pass and, in reverse, in the backward pass, where a
visit begins when the gradient of its output is there. Autograd works off the latest ops first, so
all later visits are over then. Around a visit parameters are brought, what autograd saves goes to
the host or is left out, and gradients leave when they are whole. What the next visit needs is
fetched meanwhile; which one is next is known from the step before. A step that goes another way
waits for what it needs, and says so once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from hocket.base.errors import UsageError
from hocket.runtime.offload.copy_streams import CopyEngines, HostPool
from hocket.runtime.offload.host_optimizer import HostUpdates
from hocket.runtime.offload.parameter_blocks import Block
from hocket.runtime.offload.prefetch import Slots, SlotView
from hocket.runtime.offload.recompute import Hooks, KeptAsIs, computed_again, kept_as_is
from hocket.runtime.offload.saved_tensors import KnownStorages, SavedStorages, SavedView

Forward = Callable[..., Any]


@dataclass(eq=False)
class Visit:
    """One call of a block's module."""

    block: Block
    number: int
    saved: SavedStorages | None = None
    """None where nothing is offloaded."""
    began: int = field(default_factory=torch._C._autograd._get_sequence_nr)
    """The number of the first autograd node that may be its own."""
    computes: bool = False
    """True if gradients come to what it computes; others may change its results in place so that
    they never do, where these are but views of what was there before."""


@dataclass(eq=False)
class Visits:
    """The visits of a step."""

    engines: CopyEngines
    slots: Slots
    pool: HostPool
    updates: HostUpdates
    kept_storages: frozenset[int]
    """Parameters and buffers that stay on the device."""
    sends: bool
    """True if any block offloads what is saved."""
    prefetch: int
    repeats_draws: bool
    """True if what is recomputed draws the same random numbers again."""
    begin_backward: Callable[[], None]
    """What is done when the backward pass begins."""
    begin_block: Callable[[Block], None]
    """What is done when the last backward pass of a block begins."""
    finish_block: Callable[[Block], None]
    """What is done with the gradients of a block, which are whole."""
    finish_step: Callable[[], None]
    """What is done when the backward pass is over."""
    strayed: Callable[[], None]
    """Tells that a step went another way than the one before."""
    _forward: list[Visit] = field(default_factory=list)
    is_cut_off: bool = False
    """True if a backward pass began and has not come to its end."""
    _backward: list[Visit] = field(default_factory=list)
    """Visits whose backward pass has begun and is not known to be over."""
    _route: list[Block] = field(default_factory=list)
    """Blocks as the last step visited them."""
    _position: int = -1
    """Of the last visit on the route."""
    _in_use: set[Block] = field(default_factory=set)
    _shares: dict[int, int] = field(default_factory=dict)
    """Bytes that each visit offered in the last step."""
    _known: KnownStorages = field(default_factory=KnownStorages)
    _batch: frozenset[int] = frozenset()
    """Storages of the step's batch."""
    _num_calls: Counter[str] = field(default_factory=Counter)
    """Of modules in this step, by path."""

    # ── forward ──────────────────────────────────────────────────────────────────────────────

    def begin(self, batch: Any) -> None:
        """A step begins; what an earlier one left, whose backward pass never came, is dropped."""
        self._forget_forward()
        self._known.clear()
        self._num_calls.clear()
        tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        self._batch = frozenset(tensor.untyped_storage()._cdata for tensor in tensors)
        self._backward, self._in_use, self.is_cut_off = [], set(), False
        self._position = -1

    def next_of(self, path: str, blocks: Sequence[Block]) -> Block:
        """The block that the next call of a module belongs to: they take turns."""
        turn = self._num_calls[path]
        self._num_calls[path] += 1
        return blocks[turn % len(blocks)]

    def visit(
        self, block: Block, forward: Forward, args: Sequence[Any], kwargs: Any, *,
        runs_again: bool = True,
    ) -> Any:  # fmt: skip
        """Call a block's module with all that its policy wants, as far as it can run again."""
        visit = Visit(block, len(self._forward))
        self._find(block)
        self._bring(block)
        self._look_ahead(waits=False)
        if not torch.is_grad_enabled():
            result = forward(*args, **kwargs)
            self._end(visit, result)
            return result
        self._forward.append(visit)
        self._let_go_before(visit)
        visit.saved = self._saved(visit)
        hooks = self._hooks(visit.saved)
        with _hooked(hooks), _without_cached_casts():
            if block.policy.activations == "recomputed" and runs_again:
                result = computed_again(
                    block.unmoved, forward, args, kwargs,
                    repeats_draws=self.repeats_draws and block.draws, keeping=hooks,
                )  # fmt: skip
            else:
                result = forward(*args, **kwargs)
        if block.home is not None and block.is_changed:
            raise UsageError(
                f"the forward pass of {next(iter(block.modules))!r} writes into its parameters, "
                "whose master copy is on the host under this budget",
                hint="write to them between steps, or train with more memory or without memory=",
            )
        self._end(visit, result)
        return result

    def _find(self, block: Block) -> None:
        """Where on the route this visit is."""
        expected = self._position + 1
        if self._route[expected : expected + 1] == [block]:
            self._position = expected
        else:
            places = [at for at, each in enumerate(self._route) if each is block]
            self._position = places[0] if places else len(self._route)

    def _bring(self, block: Block) -> None:
        """Have a block's parameters where it computes."""
        self._in_use.add(block)
        if block.home is None:
            return
        self._refresh(block)
        if block.resident is not None:
            self._renew(block, block.resident)
            block.renewed.wait()
            block.look_at(block.resident)
            return
        if not block.brought_bytes:
            return
        slot = self.slots.fetch(block, self._in_use)
        assert slot is not None, "there are more buffers than blocks in use at once"
        slot.ticket.wait()
        block.look_at(slot.buffer)

    def _refresh(self, block: Block) -> None:
        """Have what is copied of a block be what its parameters are now."""
        self.updates.wait(block)
        block.require_own_memory()
        if block.is_changed:
            block.returned.synchronize()
            block.look_home()
            block.round()
            block.is_stale = True
            self.slots.forget(block)

    def _renew(self, block: Block, resident: torch.Tensor) -> None:
        """Start to have the lasting copy of a block be what its parameters are."""
        if block.is_stale:
            assert block.copied is not None
            block.renewed = self.engines.fetch([(resident, block.copied)], block.left)
            block.is_stale = False

    def bring_shared(self, block: Block) -> None:
        """Have parameters that are no block's own on the device for a whole step."""
        # Whatever was computed so far may have used them.
        block.left = self.engines.mark()
        self._bring(block)
        self._in_use.discard(block)

    def _look_ahead(self, *, waits: bool) -> None:
        """Fetch what the visits after this one want."""
        after = self._position + 1
        for block in self._route[after : after + self.prefetch]:
            if block.home is None or not block.brought_bytes or block in self._in_use:
                continue
            if not waits and not block.updated.is_set():
                return
            self._refresh(block)
            if block.resident is not None:
                self._renew(block, block.resident)
            else:
                self.slots.fetch(block, self._in_use)

    def _saved(self, visit: Visit) -> SavedStorages | None:
        policy = visit.block.policy
        if not visit.block.sends:
            return None
        limit = float("inf")
        if policy.activations == "offloaded" and policy.share < 1:
            # The first step sends everything and learns how much that is.
            limit = policy.share * self._shares.get(visit.number, float("inf"))
        lasting = self.kept_storages | self._batch
        return SavedStorages(self.engines, self.pool, lasting, self._known, limit)

    def outside(self) -> AbstractContextManager[None]:
        """Around what the model does outside of visits, which keeps what it saves; a model that
        differentiates itself saves parameters there that come and go."""
        return _hooked(self._hooks(None))

    def _hooks(self, offloaded: SavedStorages | None) -> Hooks | None:
        """What autograd saves goes where the policy says; hooks take time for each tensor, and are
        not there where there is nothing to do."""
        if not self.sends and not self.slots.buffers:
            return None

        def pack(tensor: torch.Tensor) -> Any:
            if view := self.slots.noted(tensor):
                return view
            if offloaded is None and self.sends:
                self._known.keep(tensor)
            packed = tensor if offloaded is None else offloaded.pack(tensor)
            return kept_as_is(tensor) if packed is tensor else packed

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, SlotView):
                return self.slots.looked_up(packed, self._in_use)
            if isinstance(packed, SavedView):
                assert offloaded is not None
                return offloaded.unpack(packed)
            kept: KeptAsIs = packed
            return kept.unchanged()

        return pack, unpack

    def _end(self, visit: Visit, result: Any) -> None:
        block = visit.block
        self._put_back(block)
        tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if visit.saved is not None:
            self._shares[visit.number] = visit.saved.num_offered_bytes
        if torch.is_grad_enabled() and (traced := [t for t in tensors if t.requires_grad]):
            visit.computes = any(_is_own(tensor, visit.began) for tensor in traced)
            block.num_open += visit.computes
            results = _with_bases(traced, visit.began)
            register_multi_grad_hook(results, lambda _: self._enter(visit), mode="any")
        self._look_ahead(waits=True)

    def _put_back(self, block: Block) -> None:
        """The computation has used a block."""
        self._in_use.discard(block)
        if block.resident is not None:
            block.left = self.engines.mark()
        if block.is_streamed:
            self.slots.leave(block)
            block.look_home()

    def _let_go_before(self, visit: Visit) -> None:
        """What was sent in the visit before the last one leaves the device."""
        for earlier in self._forward[max(0, visit.number - 2) : max(0, visit.number - 1)]:
            if earlier.saved is not None:
                earlier.saved.let_go()

    # ── backward ─────────────────────────────────────────────────────────────────────────────

    def _enter(self, visit: Visit) -> None:
        """The backward pass comes to a visit."""
        for later in self._backward:
            self._leave(later)
        self._backward = [visit]
        self._bring(visit.block)
        if visit.saved is not None:
            visit.saved.fetch()
        for earlier in reversed(self._forward[max(0, visit.number - self.prefetch) : visit.number]):
            if not earlier.block.num_open:
                # A checkpoint of the model's own has called it in the backward pass: that is over,
                # and the host may be changing what would be fetched.
                continue
            is_brought = earlier.block.is_streamed and earlier.block.brought_bytes
            if is_brought and earlier.block not in self._in_use:
                self.slots.fetch(earlier.block, self._in_use)
            if earlier.saved is not None:
                earlier.saved.fetch()
        if visit.computes and visit.block.num_open == 1:
            self.begin_block(visit.block)

    def end_forward(self) -> None:
        """The backward pass begins."""
        # A sum of losses begins several times: then what is there was made meanwhile.
        if not self._backward:
            self.begin_backward()
        self.is_cut_off = True
        route = [each.block for each in self._forward]
        if self._route and route and route != self._route:
            self.strayed()
        self._route = route
        Variable._execution_engine.queue_callback(self._end_backward)

    def _leave(self, visit: Visit) -> None:
        """The backward pass of a visit is over."""
        block = visit.block
        self._put_back(block)
        if not visit.computes:
            return
        # A graph that is kept has a second backward pass, of which no forward pass was counted.
        block.num_open = max(0, block.num_open - 1)
        if not block.num_open:
            self.finish_block(block)

    def _end_backward(self) -> None:
        for visit in self._backward:
            self._leave(visit)
        self._backward = []
        # Of visits that the loss does not depend on no backward pass comes, and of some gradients
        # come another way than by their results.
        open_ones = (v.block for v in self._forward if v.block.num_open or not v.computes)
        for block in dict.fromkeys(open_ones):
            self.finish_block(block)
        self._forget_forward()
        self.finish_step()
        self.is_cut_off = False

    def _forget_forward(self) -> None:
        for visit in self._forward:
            visit.block.num_open = 0
        self._forward = []


def _with_bases(results: Sequence[torch.Tensor], began: int) -> list[torch.Tensor]:
    """Results, and what they look at where the visit made it: a view that is changed in place
    afterwards, as what a linear layer makes of rows of rows, has another node from then on, and the
    one that it had never runs."""
    bases = [result._base for result in results if _is_own(result, began)]
    return [*results, *(base for base in bases if base is not None and base.grad_fn is not None)]


def _is_own(result: torch.Tensor, began: int) -> bool:
    """True if a visit made a result, or what the result looks at."""
    # A view that was changed has its new node made by this; PyTorch 2.11 crashes where such a one
    # gets a hook without.
    node = result.grad_fn
    if result._base is not None:
        node = result._base.grad_fn
    return node is None or node._sequence_nr() >= began


def _hooked(hooks: Hooks | None) -> AbstractContextManager[None]:
    return nullcontext() if hooks is None else saved_tensors_hooks(*hooks)


@contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Under autocast parameters are rounded where they are used, and not all held until the end."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
