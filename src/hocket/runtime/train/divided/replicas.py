"""Data parallelism around any strategy: each rank trains on its rows, gradients become one.

A rank's loss is weighted by its share of the batch before backward, and gradients are summed over
ranks once per update, beside the last backward pass of it (`GradientReducer`), so the result is the
gradient of the mean over the whole batch however rows are shared. With ZeRO 1 and 2 (Rajbhandari
et al., 2020) each parameter has an owner among the replicas: gradients are summed there alone, the
user's optimizer finds them there alone and keeps its states there, and the new weights are sent to
the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from hocket.base.errors import UsageError
from hocket.capture.fake import model_tensors
from hocket.capture.perform import draw_seed
from hocket.plan.gradient_buckets import fill_buckets
from hocket.runtime.collectives.gradient_reducer import GradientReducer
from hocket.runtime.strategy import Passes, ReportsProgress, StepOutput, Timings, feed
from hocket.runtime.train.batches import settled
from hocket.runtime.train.cuts import TensorCut
from hocket.runtime.train.divided.clip import clip_everywhere
from hocket.runtime.train.divided.draws import draws_of
from hocket.runtime.train.divided.mesh import Mesh
from hocket.runtime.train.divided.shares import (
    Count,
    fractions,
    num_rows,
    shared_rows,
    take_rows,
)
from hocket.runtime.train.divided.state import DividedState, Home
from hocket.runtime.train.loss_weight import Weight


class Replicas:
    """Ranks that train on parts of one batch; see `Strategy`."""

    _has_reducer = True

    def __init__(
        self,
        inner: Passes,
        model: nn.Module,
        mesh: Mesh,
        *,
        shares: Sequence[int],
        count: Count | None,
        seed: int,
        zero: int,
        has_own_statistics: bool,
        cuts: Mapping[int, TensorCut],
        stage_of: Callable[[torch.Tensor], int],
        refresh: Callable[[], None],
        waited_s: Callable[[], float],
        sums_by: str | None,
        sums_in: torch.dtype | None,
        overlaps: bool,
        predicted_s: float | None,
    ) -> None:
        """With ``zero=3`` it is ``inner`` that sums gradients.

        ``cuts`` are those of tensor parallelism by the id of a parameter. ``stage_of`` gives the
        pipeline rank of this replica that updates a tensor of the model, ``refresh`` gives it to
        others, and ``waited_s`` is how long others were waited for so far. Where batch norms have
        ``has_own_statistics``, those of the first replica count. ``sums_by`` is the backend that
        sums gradients where it is not that of all else, ``sums_in`` the dtype where it is not
        that of the gradients. They are summed beside the backward pass where it ``overlaps``.
        """
        self._inner, self._model, self._mesh = inner, model, mesh
        self._shares, self._count, self._seed = tuple(shares), count, seed
        self._reduces = self._has_reducer and zero != 3 and len(shares) > 1
        self._has_own_statistics = has_own_statistics and len(shares) > 1
        self.predicted_s, self.lost = predicted_s, inner.lost
        self.tensors: Mapping[str, torch.Tensor] = inner.tensors
        self._cuts, self._refresh, self._waited_s = cuts, refresh, waited_s
        self._stages = self._stages_everywhere(stage_of)
        stages_used = [self._stages[id(p)] for p in model.parameters()]
        groups = mesh.partner_groups(stages_used, sums_by) if self._reduces else {}
        partners = [
            (group, [p for p in self._held() if self._stages[id(p)] == stages])
            for stages, group in groups.items()
            if stages[mesh.data_rank] == mesh.pipeline_rank
        ]
        self._state = DividedState(model, self._home, mesh.device, mesh.tensor_rank)
        self.computed_s: float | None = None
        self._is_summed = True
        """Whether the gradients that are there are those of all ranks."""
        self.owner_of = self._owners() if zero in (1, 2) and len(shares) > 1 else {}
        """The replica that updates a parameter, by its id; empty where all update all."""
        self._reducer: GradientReducer | None = None
        if self._reduces:
            self._reducer = GradientReducer(
                partners, root_of=self._root_of, dtype=sums_in,
                # NCCL may block where ranks issue collectives of several groups in other orders.
                overlaps=overlaps and (mesh.device.type == "cpu" or len(partners) < 2),
            )  # fmt: skip
            feed(inner, self._reducer)
        self._is_last = True
        """Whether the next batch is the last one of its update."""
        self._pending: list[Any] = []
        """Sums of losses that are under way."""

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def train(self, batch: Any, step: int, weight: Weight) -> StepOutput:
        """Forward and backward of this rank's rows; the loss is that of the whole batch."""
        rows, fraction = self._own(batch)
        self._begin()
        with self._own_draws(step), self._syncing():
            carried = self._inner.train(rows, step, weight * fraction)
        # The loss travels beside gradients where these are waited for before anyone reads it.
        whole = self._whole_loss(carried.loss, fraction, is_async=self._is_last and self._reduces)
        return StepOutput(whole, carried.outputs)

    def timed(self, batch: Any, step: int, weight: Weight) -> tuple[StepOutput, Timings | None]:
        """As `train`, with every op of this rank timed."""
        rows, fraction = self._own(batch)
        self._begin()
        began_s, waited_s = time.perf_counter(), self._waited_s()
        with self._own_draws(step), self._syncing():
            carried, timings = self._inner.timed(rows, step, weight * fraction)
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)
        self.computed_s = time.perf_counter() - began_s - (self._waited_s() - waited_s)
        return StepOutput(self._whole_loss(carried.loss, fraction), carried.outputs), timings

    def forward(self, batch: Any, step: int) -> StepOutput:
        """The loss of this rank's rows, which counts its share of the batch in ``backward()``.

        Its value is that of the whole batch.
        """
        if self.owner_of:
            raise UsageError(
                "ranks that share the optimizer's states (ZeRO 1 and 2) exchange weights after an "
                "update, which optimizer.step() alone does not do",
                hint="call train.step(batch) instead of loss.backward() and optimizer.step()",
            )
        rows, fraction = self._own(batch)
        self._begin()
        if self._reducer is not None:
            self._reducer.is_enabled = True
        with self._own_draws(step):
            carried = self._inner.forward(rows, step)
        whole = self._whole_loss(carried.loss.detach(), fraction)
        share: torch.Tensor = _SummedAfter.apply(carried.loss * fraction, self._agree)  # type: ignore[no-untyped-call]
        return StepOutput(share + (whole - share.detach()), carried.outputs)

    def evaluate(self, batch: Any) -> StepOutput:
        """The loss of the whole batch, from the rows of all ranks."""
        if num_rows(batch) < len(self._shares):
            return self._inner.evaluate(batch)
        rows, fraction = self._own(batch)
        self._share_statistics()
        carried = self._inner.evaluate(rows)
        return StepOutput(self._whole_loss(carried.loss, fraction), carried.outputs)

    def predict(self, batch: Any) -> Any:
        """What the model returns for all rows: every rank computes its own and gets the others'."""
        total = num_rows(batch)
        if total < len(self._shares):
            return self._inner.predict(batch)
        parts = shared_rows(total, self._shares)
        own = parts[self._mesh.data_rank]
        self._share_statistics()
        found = self._inner.predict(settled(take_rows(batch, own)))

        def whole(leaf: Any) -> Any:
            is_rows = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == len(own)
            return self._joined_rows(leaf, parts) if is_rows else leaf

        return found if len(parts) == 1 else tree_map(whole, found)

    # ── updates ──────────────────────────────────────────────────────────────────────────────

    def expect(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Updates wait for the gradients of all ranks."""

    def set_requires_gradient_sync(self, is_required: bool) -> None:
        """False: gradients of the next batch stay on this rank; see `SyncsGradients`."""
        self._is_last = is_required

    def report_progress(self, tell: Callable[[float], None]) -> None:
        """Call with the part of this rank's rows that is done; see `ReportsProgress`."""
        if isinstance(self._inner, ReportsProgress):
            self._inner.report_progress(tell)

    @contextmanager
    def _syncing(self) -> Iterator[None]:
        """Sum gradients as they come within, where no batch of this update follows."""
        if self._reducer is None:
            yield
            return
        self._reducer.is_enabled = self._is_last
        try:
            yield
        finally:
            self._reducer.is_enabled = False

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of the optimizer with the gradients of all ranks; all have the new weights."""
        self._agree()
        self._inner.update(optimizer)
        self._spread()
        self._refresh()

    def _agree(self) -> None:
        """Sum the gradients of all ranks, each where its parameter is updated."""
        if self._is_summed:
            return
        self._is_summed = True
        if self._reducer is not None:
            self._reducer.is_enabled = False
            self._reducer.finish()
        while self._pending:
            self._pending.pop().wait()

    def _spread(self) -> None:
        """Send updated weights from their owners to the other replicas."""
        trained = [p for p in self._held() if p.requires_grad] if self.owner_of else []
        for owner, bucket in self._buckets(trained):
            flat = torch.cat([p.detach().reshape(-1) for p in bucket])
            dist.broadcast(flat, self._data_peer(owner), group=self._mesh.data_group)
            if owner != self._mesh.data_rank:
                _fill((p.detach() for p in bucket), flat)

    def clip(self, max_norm: float) -> None:
        """By the norm of all gradients of all ranks."""
        self._agree()
        clip_everywhere(self._held(), self._counts, max_norm, self._mesh.device)

    def gather(self, optimizer: torch.optim.Optimizer) -> None:
        """See `gathered`: nothing is put together in place."""

    def gathered(self, optimizer: torch.optim.Optimizer, *, pending: bool) -> dict[str, Any]:
        """The state as one process would have it, on every rank."""
        if pending:
            self._agree()
        return self._state.gathered(optimizer, pending=pending)

    def parts(self, optimizer: torch.optim.Optimizer, *, pending: bool) -> dict[str, Any]:
        """What this rank keeps of a state that all ranks write together."""
        if pending:
            self._agree()
        return self._state.parts(optimizer, pending=pending)

    def take(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Load this rank's part of a state; gradients of a checkpoint are those of all ranks."""
        self._state.take(state, optimizer)
        self._is_summed = True

    # ── parts ────────────────────────────────────────────────────────────────────────────────

    def _is_own(self, parameter: torch.Tensor) -> bool:
        """True if this replica speaks for a parameter."""
        return self.owner_of.get(id(parameter), 0) == self._mesh.data_rank

    def _counts(self, parameter: nn.Parameter) -> bool:
        """True if this rank is the one that counts a gradient in a norm of all."""
        is_first = not self._mesh.tensor_rank or id(parameter) in self._cuts
        return is_first and (isinstance(parameter, DTensor) or self._is_own(parameter))

    def _home(self, name: str, tensor: torch.Tensor) -> Home:
        cut, owner = self._cuts.get(id(tensor)), self.owner_of.get(id(tensor), 0)
        mesh = self._mesh
        # A buffer that a module has made anew is with every stage.
        stages = self._stages.get(id(tensor), (0,) * len(self._shares))
        ranks = tuple(
            mesh.rank_of(pipeline=stages[owner], data=owner, tensor=piece)
            for piece in range(cut.num_pieces if cut is not None else 1)
        )
        is_updated = stages[mesh.data_rank] == mesh.pipeline_rank and (
            not self.owner_of or owner == mesh.data_rank
        )
        return Home(ranks, cut, is_here=not tensor.is_meta, is_updated=is_updated)

    def _owners(self) -> dict[int, int]:
        """Of the parameters of every stage, also of those that are with other ranks."""
        by_stage: dict[int, list[nn.Parameter]] = {}
        for parameter in self._model.parameters():
            stage = self._stages[id(parameter)][self._mesh.data_rank]
            by_stage.setdefault(stage, []).append(parameter)
        found: dict[int, int] = {}
        for parameters in by_stage.values():
            found |= owners(parameters, len(self._shares))
        return found

    def _stages_everywhere(
        self, stage_of: Callable[[torch.Tensor], int]
    ) -> dict[int, tuple[int, ...]]:
        """The pipeline rank that updates a tensor, in each replica, by the tensor's id."""
        tensors = [tensor for _, _, tensor in model_tensors(self._model)]
        own = torch.tensor([stage_of(tensor) for tensor in tensors], device=self._mesh.device)
        everywhere = torch.stack(self._mesh.of_replicas(own)).T.tolist()
        return {id(t): tuple(stages) for t, stages in zip(tensors, everywhere, strict=True)}

    def _held(self) -> list[nn.Parameter]:
        return [p for p in self._model.parameters() if not p.is_meta]

    def _own(self, batch: Any) -> tuple[Any, float]:
        parts = shared_rows(num_rows(batch), self._shares)
        own = self._mesh.data_rank
        rows = batch if len(parts) == 1 else settled(take_rows(batch, parts[own]))
        return rows, fractions(batch, parts, self._count)[own]

    def _begin(self) -> None:
        """Sums of before count once: one replica goes on with each, the others anew."""
        if self._is_summed and self._reducer is not None:
            for parameter in self._held():
                if not self._is_own(parameter):
                    parameter.grad = None
            self._reducer.begin()
        self._is_summed = False

    def _own_draws(self, step: int) -> Any:
        """Random draws of a step that tensor-parallel ranks share and replicas do not.

        Outside, the generator goes on as it does for all ranks, so that they shuffle data alike.
        """
        place = self._mesh.pipeline_rank * len(self._shares) + self._mesh.data_rank
        return draws_of(draw_seed(self._seed, step, place), self._mesh.device)

    def _share_statistics(self) -> None:
        """Give all replicas the statistics of the first one's batch norms."""
        if self._has_own_statistics:
            for name, buffer in self._model.named_buffers():
                dist.broadcast(buffer, self._home(name, buffer).ranks[0])

    def _whole_loss(
        self, loss: torch.Tensor, fraction: float, *, is_async: bool = False
    ) -> torch.Tensor:
        whole = loss.detach() * fraction
        if len(self._shares) > 1:
            work = self._mesh.sum_over_replicas(whole)
            if is_async:
                self._pending.append(work)
            else:
                work.wait()
        return whole

    def _joined_rows(self, own: torch.Tensor, parts: Sequence[range]) -> torch.Tensor:
        """The rows of all ranks; parts are padded to one size, since messages must be alike."""
        most = max(len(rows) for rows in parts)
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        found = self._mesh.of_replicas(padded)
        return torch.cat([part[: len(rows)] for part, rows in zip(found, parts, strict=True)])

    def _buckets(
        self, parameters: Sequence[nn.Parameter]
    ) -> Iterator[tuple[int, list[nn.Parameter]]]:
        """Parameters of one owner and type that go in one message."""
        keys = [(self.owner_of.get(id(p), 0), p.dtype) for p in parameters]
        sizes = [p.numel() * p.itemsize for p in parameters]
        for members in fill_buckets(zip(keys, sizes, strict=True)):
            yield keys[members[0]][0], [parameters[at] for at in members]

    def _root_of(self, parameter: nn.Parameter) -> int | None:
        """The rank that alone needs the sum of a gradient, None where all do."""
        return self._data_peer(self.owner_of[id(parameter)]) if self.owner_of else None

    def _data_peer(self, replica: int) -> int:
        mesh = self._mesh
        return mesh.rank_of(pipeline=mesh.pipeline_rank, data=replica, tensor=mesh.tensor_rank)


class _SummedAfter(torch.autograd.Function):
    """A loss whose backward pass ends with something more."""

    @staticmethod
    def forward(context: Any, loss: torch.Tensor, finish: Callable[[], None]) -> torch.Tensor:
        context.finish = finish
        return loss.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        # As DDP and FSDP2 do; there is no public call for the end of a backward pass.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(context.finish)
        return gradient, None


def owners(parameters: Sequence[nn.Parameter], num_replicas: int) -> dict[int, int]:
    """A replica for each parameter, by its id: the largest first, to whom has least."""
    load = [0] * num_replicas
    found: dict[int, int] = {}
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        replica = min(range(num_replicas), key=load.__getitem__)
        load[replica] += parameter.numel()
        found[id(parameter)] = replica
    return found


def _fill(tensors: Iterable[torch.Tensor], flat: torch.Tensor) -> None:
    at = 0
    for tensor in tensors:
        tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
        at += tensor.numel()
