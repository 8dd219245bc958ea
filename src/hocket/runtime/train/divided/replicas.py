"""Data parallelism around any carrier: each rank trains on its rows, gradients become one.

A rank's loss is weighted by its share of the batch before backward, and gradients are summed over
ranks once per update, so the result is the gradient of the mean over the whole batch however rows
are shared. With ZeRO 1 and 2 (Rajbhandari et al., 2020) each parameter has an owner among the
replicas: gradients are summed there alone, the person's optimizer finds them there alone and keeps
its states there, and the new weights are sent to the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from hocket.capture.fake import model_tensors
from hocket.capture.perform import draw_seed
from hocket.runtime.train.batches import settled
from hocket.runtime.train.carrier import Carried, Passes, Timings
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
from hocket.runtime.train.weight import Weight

_BUCKET_BYTES = 32 * 2**20
"""Gradients that go in one message."""


class Replicas:
    """Ranks that train on parts of one batch; see `Carrier`."""

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
        predicted_s: float | None,
    ) -> None:
        """With ``zero=3`` it is ``inner`` that sums gradients.

        ``cuts`` are those of tensor parallelism by the id of a parameter. ``stage_of`` gives the
        pipeline rank of this replica that updates a tensor of the model, ``refresh`` gives it to
        others, and ``waited_s`` is how long others were waited for so far. Where batch norms have
        ``has_own_statistics``, those of the first replica count. ``sums_by`` is the backend that
        sums gradients where it is not that of all else.
        """
        self._inner, self._model, self._mesh = inner, model, mesh
        self._shares, self._count, self._seed = tuple(shares), count, seed
        self._reduces = zero != 3 and len(shares) > 1
        self._has_own_statistics = has_own_statistics and len(shares) > 1
        self.predicted_s, self.lost = predicted_s, inner.lost
        self.tensors: Mapping[str, torch.Tensor] = inner.tensors
        self._cuts, self._refresh, self._waited_s = cuts, refresh, waited_s
        self._stages = self._stages_everywhere(stage_of)
        stages_used = [self._stages[id(p)] for p in model.parameters()]
        groups = mesh.partner_groups(stages_used, sums_by) if self._reduces else {}
        self._partners = [
            (group, [p for p in self._held() if self._stages[id(p)] == stages])
            for stages, group in groups.items()
            if stages[mesh.data_rank] == mesh.pipeline_rank
        ]
        """Weights that this rank updates, with the ranks of other replicas that do as well."""
        self._state = DividedState(model, self._home, mesh.device, mesh.tensor_rank)
        self.computed_s: float | None = None
        self._is_summed = True
        """Whether the gradients that are there are those of all ranks."""
        self.owner_of = self._owners() if zero in (1, 2) and len(shares) > 1 else {}
        """The replica that updates a parameter, by its id; empty where all update all."""

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def train(self, batch: Any, step: int, weight: Weight) -> Carried:
        """Forward and backward of this rank's rows; the loss is that of the whole batch."""
        rows, fraction = self._own(batch)
        self._begin()
        with self._own_draws(step):
            carried = self._inner.train(rows, step, weight * fraction)
        return Carried(self._whole_loss(carried.loss, fraction), carried.outputs)

    def timed(self, batch: Any, step: int, weight: Weight) -> tuple[Carried, Timings | None]:
        """As `train`, with every op of this rank timed."""
        rows, fraction = self._own(batch)
        self._begin()
        began_s, waited_s = time.perf_counter(), self._waited_s()
        with self._own_draws(step):
            carried, timings = self._inner.timed(rows, step, weight * fraction)
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)
        self.computed_s = time.perf_counter() - began_s - (self._waited_s() - waited_s)
        return Carried(self._whole_loss(carried.loss, fraction), carried.outputs), timings

    def forward(self, batch: Any, step: int) -> Carried:
        """The loss of this rank's rows, which counts its share of the batch in ``backward()``.

        Its value is that of the whole batch.
        """
        rows, fraction = self._own(batch)
        self._begin()
        with self._own_draws(step):
            carried = self._inner.forward(rows, step)
        whole = self._whole_loss(carried.loss.detach(), fraction)
        share = carried.loss * fraction
        return Carried(share + (whole - share.detach()), carried.outputs)

    def evaluate(self, batch: Any) -> Carried:
        """The loss of the whole batch, from the rows of all ranks."""
        if num_rows(batch) < len(self._shares):
            return self._inner.evaluate(batch)
        rows, fraction = self._own(batch)
        self._share_statistics()
        carried = self._inner.evaluate(rows)
        return Carried(self._whole_loss(carried.loss, fraction), carried.outputs)

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
        for group, held in self._partners:
            used = torch.tensor([float(p.grad is not None) for p in held], device=self._mesh.device)
            dist.all_reduce(used, group=group)
            trained = [p for p, num in zip(held, used.tolist(), strict=True) if num]
            for parameter in trained:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            for owner, bucket in self._buckets(trained):
                self._sum(owner, bucket, group)

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
        """Whether this replica speaks for a parameter."""
        return self.owner_of.get(id(parameter), 0) == self._mesh.data_rank

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank is the one that counts a gradient in a norm of all."""
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
        if self._is_summed and self._reduces:
            for parameter in self._held():
                if not self._is_own(parameter):
                    parameter.grad = None
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

    def _whole_loss(self, loss: torch.Tensor, fraction: float) -> torch.Tensor:
        whole = loss.detach() * fraction
        if len(self._shares) > 1:
            self._mesh.sum_over_replicas(whole)
        return whole

    def _joined_rows(self, own: torch.Tensor, parts: Sequence[range]) -> torch.Tensor:
        """The rows of all ranks; parts are padded to one size, since messages must be alike."""
        most = max(len(rows) for rows in parts)
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        found = self._mesh.of_replicas(padded)
        return torch.cat([part[: len(rows)] for part, rows in zip(found, parts, strict=True)])

    def _buckets(
        self, parameters: Iterable[nn.Parameter]
    ) -> Iterator[tuple[int, list[nn.Parameter]]]:
        """Parameters of one owner and type that go in one message; owner 0 where all are alike."""
        open_buckets: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
        sizes: dict[tuple[int, torch.dtype], int] = {}
        for parameter in parameters:
            key = self.owner_of.get(id(parameter), 0), parameter.dtype
            open_buckets.setdefault(key, []).append(parameter)
            sizes[key] = sizes.get(key, 0) + parameter.numel() * parameter.itemsize
            if sizes[key] >= _BUCKET_BYTES:
                yield key[0], open_buckets.pop(key)
                sizes[key] = 0
        for (owner, _), bucket in open_buckets.items():
            yield owner, bucket

    def _sum(self, owner: int, bucket: Sequence[nn.Parameter], group: Any) -> None:
        gradients = [p.grad for p in bucket if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        if not self.owner_of:
            dist.all_reduce(flat, group=group)
        else:
            dist.reduce(flat, self._data_peer(owner), group=group)
            if owner != self._mesh.data_rank:
                for parameter in bucket:
                    parameter.grad = None
                return
        _fill(gradients, flat)

    def _data_peer(self, replica: int) -> int:
        mesh = self._mesh
        return mesh.rank_of(pipeline=mesh.pipeline_rank, data=replica, tensor=mesh.tensor_rank)


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
