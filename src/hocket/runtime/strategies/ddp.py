"""Data parallelism around another strategy: each rank trains on its local batch.

The loss of a rank is weighted by its fraction of the batch before the backward pass, and
`GradientReducer` sums gradients over ranks during the last backward pass of an update. The result
is the gradient of the mean over the batch, however the batch is split. With ZeRO 1 and 2
(Rajbhandari et al., 2020) each parameter is owned by one replica. Its gradient is reduced to the
owner, the owner's optimizer updates it, and the new weight is broadcast. `PriorityDataParallel`
sends gradients by priority (P3), and `join_batch_norms` sums batch-norm statistics over ranks.

Torch's DDP is not used, because replicas may differ in batch size and stages, and because traced
steps run without autograd, whose hooks DDP needs. Torch's ZeroRedundancyOptimizer is not used,
because it replaces the user's optimizer by one that it constructs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from hocket.base.errors import UsageError
from hocket.capture.fake import model_tensors
from hocket.capture.perform import draw_seed
from hocket.plan.gradient_buckets import fill_buckets
from hocket.runtime.batches import brought, settled
from hocket.runtime.checkpoint import TensorCut
from hocket.runtime.collectives.gradient_reducer import GradientReducer
from hocket.runtime.strategies.accumulate import join_trees, seeded_rng
from hocket.runtime.strategies.batch_split import loss_weights, num_rows, split_rows, take_rows
from hocket.runtime.strategies.parallel_state import ParallelState, TensorOwner
from hocket.runtime.strategies.parallel_task import ParallelTask, RankPart
from hocket.runtime.strategies.pipeline import Pipeline
from hocket.runtime.strategies.tensor import all_reduce_both
from hocket.runtime.strategy import LoopOptions, StepOutput, Strategy, Timings
from hocket.runtime.trace_options import Weight


class DataParallel(Strategy):
    """Data parallelism: every rank trains on its local batch, and gradients are summed."""

    _has_reducer = True

    def __init__(
        self,
        inner: Strategy,
        task: ParallelTask,
        part: RankPart,
        *,
        cuts: Mapping[int, TensorCut],
        pipeline: Pipeline | None,
    ) -> None:
        """``inner`` trains the local batch of this rank; with ZeRO 3 it reduces gradients itself.

        ``cuts`` maps the id of a tensor-parallel parameter to its split.
        """
        self.inner, self._model, self._mesh = inner, task.model, part.mesh
        self._has_budget = task.memory is not None
        self._updates_in_waves = task.waves is not None and task.waves.changes == "wave"
        self._batch_split, self._count = tuple(part.batch_split), task.count
        self._seed = task.options.seed or 0
        self._cuts, self._pipeline = cuts, pipeline
        is_replicated = len(self._batch_split) > 1
        norms = batch_norms_in_training(task.model)
        self._has_own_statistics = is_replicated and not part.joins_norms and bool(norms)
        """True if batch-norm statistics differ between replicas; evaluation uses replica 0's."""
        self.predicted_s, self.lost = task.predicted_s, inner.lost
        self.tensors: Mapping[str, torch.Tensor] = inner.tensors
        self._stages = self._stages_everywhere()
        self.rank_state = ParallelState(
            task.model, self._owner, part.mesh.device, part.mesh.tensor_rank,
            has_whole_gradients=self._has_reducer,
        )  # fmt: skip
        self._is_reduced = True
        """True if the current gradients are already summed over all ranks."""
        self._is_last = True
        """True if the next batch is the last microbatch before the optimizer step."""
        self._pending: list[Any] = []
        """Asynchronous loss sums that are not finished yet."""
        self.owner_of = self._owners() if part.zero in (1, 2) and is_replicated else {}
        """Replica that updates a parameter, by the parameter's id; empty if all replicas do."""
        self._reducer: GradientReducer | None = None
        if self._has_reducer and part.zero != 3 and is_replicated:
            self._reducer = self._make_reducer(task)
            inner.feed(self._reducer)

    def _make_reducer(self, task: ParallelTask) -> GradientReducer:
        mesh = self._mesh
        used = [self._stages[id(p)] for p in self._model.parameters()]
        # Under a memory budget gradients are reduced on the host, where they do not count.
        on_host = torch.device("cpu") if self._has_budget else None
        backend = "gloo" if on_host is not None else task.reduce_backend
        partners = [
            (group, [p for p in self._held() if self._stages[id(p)] == stages])
            for stages, group in mesh.partner_groups(used, backend).items()
            if stages[mesh.data_rank] == mesh.pipeline_rank
        ]
        return GradientReducer(
            partners, root_of=self._root_of, dtype=task.reduce_dtype, device=on_host,
            # NCCL may block if ranks issue collectives of several groups in different orders.
            overlaps=task.overlaps and (mesh.device.type == "cpu" or len(partners) < 2),
        )  # fmt: skip

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def train(self, batch: Any, step: int, weight: Weight) -> StepOutput:
        """Run forward and backward on this rank's samples; returns the loss of the full batch."""
        rows, part = self._own_rows(batch)
        self._start_update()
        with self._own_rng(step), self._reducing():
            found = self.inner.train(rows, step, weight * part)
        # `_reduce` waits for gradients and loss before the loss is read, so its sum may overlap.
        is_async = self._is_last and self._reducer is not None
        return StepOutput(self._mean_loss(found.loss, part, is_async=is_async), found.outputs)

    def timed(self, batch: Any, step: int, weight: Weight) -> tuple[StepOutput, Timings | None]:
        """Train like `train`, and also return timings of every op of this rank."""
        rows, part = self._own_rows(batch)
        self._start_update()
        started_s, waited_s = time.perf_counter(), self._waited_s()
        with self._own_rng(step), self._reducing():
            found, timings = self.inner.timed(rows, step, weight * part)
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)
        self.computed_s = time.perf_counter() - started_s - (self._waited_s() - waited_s)
        return StepOutput(self._mean_loss(found.loss, part), found.outputs), timings

    def forward(self, batch: Any, step: int) -> StepOutput:
        """Return the loss of the full batch; its ``backward()`` uses this rank's samples only."""
        if self.owner_of or self._has_budget:
            raise UsageError(
                "ranks that share the optimizer's states (ZeRO 1 and 2) or keep a memory budget do "
                "more after a backward pass than optimizer.step() does",
                hint="call train.step(batch) instead of loss.backward() and optimizer.step()",
            )
        rows, part = self._own_rows(batch)
        self._start_update()
        if self._reducer is not None:
            self._reducer.is_enabled = True
        with self._own_rng(step):
            found = self.inner.forward(rows, step)
        whole = self._mean_loss(found.loss.detach(), part)
        # The value is the loss of the full batch, the gradient is that of this rank's part.
        own: torch.Tensor = _ReducedAfter.apply(found.loss * part, self._reduce)  # type: ignore[no-untyped-call]
        return StepOutput(own + (whole - own.detach()), found.outputs)

    def evaluate(self, batch: Any) -> StepOutput:
        """Return the loss of the full batch, computed from the samples of all ranks."""
        # Too few samples for all replicas: each one evaluates the full batch.
        if num_rows(batch) < len(self._batch_split):
            return self.inner.evaluate(batch)
        rows, part = self._own_rows(batch)
        self._broadcast_statistics()
        found = self.inner.evaluate(rows)
        return StepOutput(self._mean_loss(found.loss, part), found.outputs)

    def predict(self, batch: Any) -> Any:
        """Return the model's outputs for all samples, each computed by one replica."""
        total, device = num_rows(batch), self._mesh.device
        if len(self._batch_split) == 1 or total < len(self._batch_split):
            return self.inner.predict(batch)
        parts = split_rows(total, self._batch_split)
        self._broadcast_statistics()
        own = self.inner.predict(settled(take_rows(batch, parts[self._mesh.data_rank])))
        found = self._mesh.of_each_replica(brought(own, torch.device("cpu")))
        sizes = [len(rows) for rows in parts]
        return brought(join_trees(found, [size / total for size in sizes], sizes), device)

    # ── updates ──────────────────────────────────────────────────────────────────────────────

    def expect(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Defer updates until gradients of all ranks are summed, unless each wave is an update."""
        self.inner.expect(optimizer if self._updates_in_waves else None)

    def set_requires_gradient_sync(self, is_required: bool) -> None:
        """With False, gradients of the next batch stay on this rank."""
        self._is_last = is_required

    @contextmanager
    def _reducing(self) -> Iterator[None]:
        """Reduce gradients as they are computed, in the last batch of an update."""
        if self._reducer is None:
            yield
            return
        self._reducer.is_enabled = self._is_last
        try:
            yield
        finally:
            self._reducer.is_enabled = False

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer with the summed gradients; all ranks then hold the new weights."""
        self._reduce()
        self.inner.update(optimizer)
        self._broadcast_weights()
        if self._pipeline is not None:
            self._pipeline.refresh()

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Finish the sums of gradients."""
        self._reduce()

    def _reduce(self) -> None:
        """Finish summing gradients, each on the ranks that update its parameter."""
        if self._is_reduced:
            return
        self._is_reduced = True
        if self._reducer is not None:
            self._reducer.is_enabled = False
            self._reducer.finish()
        while self._pending:
            self._pending.pop().wait()

    @torch.no_grad()
    def _broadcast_weights(self) -> None:
        """Send updated weights from their owners to the other replicas."""
        if not self.owner_of:
            return
        trained = [p for p in self._held() if p.requires_grad]
        keys = [(self.owner_of[id(p)], p.dtype) for p in trained]
        sizes = [p.numel() * p.itemsize for p in trained]
        # Few large messages instead of one per parameter.
        for members in fill_buckets(zip(keys, sizes, strict=True)):
            bucket, (owner, _) = [trained[at] for at in members], keys[members[0]]
            flat = torch.cat([p.reshape(-1) for p in bucket])
            dist.broadcast(flat, self._data_peer(owner), group=self._mesh.data_group)
            for p, value in zip(
                bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True
            ):
                p.copy_(value.view_as(p))

    @torch.no_grad()
    def clip(self, max_norm: float) -> None:
        """Clip by the norm of all gradients of all ranks, each counted once."""
        self._reduce()
        # In float64, because ranks sum the squares in another order than one process does.
        square = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        held = [(p, _local(p.grad)) for p in self._held() if p.grad is not None]
        for parameter, gradient in held:
            if self._counts(parameter):
                norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
                square += norm.square().to(square.device)
        # Over all ranks, because `_counts` selects exactly one rank for each gradient.
        dist.all_reduce(square)
        # The same epsilon as in torch.nn.utils.clip_grad_norm_.
        scale = torch.clamp(max_norm / (square.sqrt() + 1e-6), max=1.0)
        for _, gradient in held:
            gradient.mul_(scale.to(gradient.device, gradient.dtype))

    # ── owners of tensors ────────────────────────────────────────────────────────────────────

    def _owner(self, tensor: torch.Tensor) -> TensorOwner:
        cut, owner = self._cuts.get(id(tensor)), self.owner_of.get(id(tensor), 0)
        mesh = self._mesh
        # A buffer that a module has replaced is held by every stage.
        stages = self._stages.get(id(tensor), (0,) * len(self._batch_split))
        ranks = tuple(
            mesh.rank_of(pipeline=stages[owner], data=owner, tensor=piece)
            for piece in range(cut.num_pieces if cut is not None else 1)
        )
        is_updated = stages[mesh.data_rank] == mesh.pipeline_rank and (
            not self.owner_of or owner == mesh.data_rank
        )
        return TensorOwner(ranks, cut, is_here=not tensor.is_meta, is_updated=is_updated)

    def _owners(self) -> dict[int, int]:
        """Assign each parameter to the replica with the least load, the largest first."""
        load: dict[tuple[int, int], int] = {}
        found: dict[int, int] = {}
        for parameter in sorted(self._model.parameters(), key=lambda p: -p.numel()):
            stage = self._stages[id(parameter)][self._mesh.data_rank]
            replicas = range(len(self._batch_split))
            owner = min(replicas, key=lambda replica: load.get((stage, replica), 0))
            # Load is counted per stage, because stages update at the same time on different ranks.
            load[stage, owner] = load.get((stage, owner), 0) + parameter.numel()
            found[id(parameter)] = owner
        return found

    def _stages_everywhere(self) -> dict[int, tuple[int, ...]]:
        """Return the pipeline rank that updates a tensor, in each replica, by the tensor's id."""
        tensors = [tensor for _, _, tensor in model_tensors(self._model)]
        pipeline = self._pipeline
        own = [0 if pipeline is None else pipeline.stage_of(tensor) for tensor in tensors]
        everywhere = zip(*self._mesh.of_each_replica(own), strict=True)
        return {id(t): stages for t, stages in zip(tensors, everywhere, strict=True)}

    # ── parts of this rank ───────────────────────────────────────────────────────────────────

    def _held(self) -> list[nn.Parameter]:
        return [p for p in self._model.parameters() if not p.is_meta]

    def _is_own(self, parameter: torch.Tensor) -> bool:
        """True if this replica owns a parameter; without ZeRO 1 or 2 the first replica owns all."""
        return self.owner_of.get(id(parameter), 0) == self._mesh.data_rank

    def _counts(self, parameter: nn.Parameter) -> bool:
        """True if this rank adds a gradient to the common norm, so that it is counted once."""
        is_first = not self._mesh.tensor_rank or id(parameter) in self._cuts
        return is_first and (isinstance(parameter, DTensor) or self._is_own(parameter))

    def _own_rows(self, batch: Any) -> tuple[Any, float]:
        """Return the samples of this rank, and the weight of their loss in the batch's loss."""
        parts = split_rows(num_rows(batch), self._batch_split)
        own = self._mesh.data_rank
        rows = batch if len(parts) == 1 else settled(take_rows(batch, parts[own]))
        return rows, loss_weights(batch, parts, self._count)[own]

    def _start_update(self) -> None:
        """Start an update: drop already reduced gradients on all replicas but the owner.

        The next reduction would otherwise count them once per replica.
        """
        if self._is_reduced and self._reducer is not None:
            for parameter in self._held():
                if not self._is_own(parameter):
                    parameter.grad = None
            self._reducer.begin()
        self._is_reduced = False

    def _own_rng(self, step: int) -> Any:
        """Seed draws of a step: equally on tensor-parallel ranks, differently on replicas.

        Outside the context the generator has the same state on all ranks, so that they shuffle data
        equally.
        """
        place = self._mesh.pipeline_rank * len(self._batch_split) + self._mesh.data_rank
        return seeded_rng(draw_seed(self._seed, step, place), self._mesh.device)

    def _waited_s(self) -> float:
        """Return the seconds that this rank has waited for other stages so far."""
        return self._pipeline.channels.waited_s if self._pipeline is not None else 0.0

    def _broadcast_statistics(self) -> None:
        """Copy the first replica's batch-norm statistics to all replicas."""
        if self._has_own_statistics:
            for buffer in self._model.buffers():
                dist.broadcast(buffer, self._owner(buffer).ranks[0])

    def _mean_loss(
        self, loss: torch.Tensor, part: float, *, is_async: bool = False
    ) -> torch.Tensor:
        whole = loss.detach() * part
        if len(self._batch_split) > 1:
            work = self._mesh.sum_over_replicas(whole)
            if is_async:
                self._pending.append(work)
            else:
                work.wait()
        return whole

    def _root_of(self, parameter: nn.Parameter) -> int | None:
        """Return the rank to which a gradient is reduced; None for an all-reduce."""
        return self._data_peer(self.owner_of[id(parameter)]) if self.owner_of else None

    def _data_peer(self, replica: int) -> int:
        mesh = self._mesh
        return mesh.rank_of(pipeline=mesh.pipeline_rank, data=replica, tensor=mesh.tensor_rank)


def _local(gradient: Any) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


class _ReducedAfter(torch.autograd.Function):
    """A loss whose backward pass ends with the reduction of gradients."""

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


# ── priority gradient sync ───────────────────────────────────────────────────────────────────────


class PriorityDataParallel(DataParallel):
    """Data parallelism whose next step starts while gradients are in flight (P3).

    `hocket.runtime.collectives.priority_sync` works by hooks of modules and parameters, so the
    model itself is run, not a traced step. Torch's DDP, in contrast, waits for all gradients before
    the update.
    """

    _has_reducer = False

    def __init__(self, inner: Strategy, task: ParallelTask, part: RankPart, **options: Any) -> None:
        super().__init__(inner, task, part, **options)
        assert task.start_propagation is not None
        self._propagation = task.start_propagation()

    def _own_rows(self, batch: Any) -> tuple[Any, float]:
        # `Propagation` averages over ranks, whereas `part` is the weight of a term in a sum.
        rows, part = super()._own_rows(batch)
        return rows, part * len(self._batch_split)

    def _mean_loss(
        self, loss: torch.Tensor, part: float, *, is_async: bool = False
    ) -> torch.Tensor:
        return super()._mean_loss(loss, part / len(self._batch_split))

    @contextmanager
    def _reducing(self) -> Iterator[None]:
        if self._is_last:
            yield
        else:
            with self._propagation.no_sync():
                yield

    def _start_update(self) -> None:
        """Do nothing: gradients of the previous step are in flight."""

    def _reduce(self) -> None:
        """Do nothing: gradients are summed while ranks compute."""

    def clip(self, max_norm: float) -> None:
        """Refuse: the sums of gradients are not complete before the next step begins."""
        raise UsageError(
            "gradients that are sent by priority cannot be clipped by their common norm",
            hint="plan without the section priority, or leave clipping out",
        )

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the sums that are in flight."""
        self._propagation.finish()


def priority_obstacle(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: LoopOptions
) -> str:
    """Return the reason why gradients cannot be sent by priority, or an empty string."""
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    reasons = {
        "they are clipped by their common norm": options.clip_norm is not None,
        "some weights have no memory yet": any(p.is_meta for p in trained),
        "the optimizer updates other weights than the model trains": updated != trained,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


# ── batch norm ───────────────────────────────────────────────────────────────────────────────────
#
# Mean and variance are sums over ranks, and their gradients are sums over ranks as well (Zhang et
# al., "Context Encoding", 2018). Torch's SyncBatchNorm runs on GPUs alone.


def join_batch_norms(model: nn.Module, group: Any) -> None:
    """Let every batch norm compute its statistics over the samples of all ranks of a group."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            # The class stays, with names and parameters; a copy of the module binds to itself.
            joined = _joined_forward(type(module).forward, group)
            module.forward = MethodType(joined, module)  # type: ignore[method-assign]


def batch_norms_in_training(model: nn.Module) -> list[str]:
    """Return the names of batch norms that would normalise by statistics of the current batch."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    ]


def _joined_forward(alone: Callable[..., torch.Tensor], group: Any) -> Callable[..., torch.Tensor]:
    def forward(self: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
        if not self.training and self.running_mean is not None:
            return alone(self, x)
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        dims = [dim for dim in range(x.dim()) if dim != 1]
        rows = x.new_full((1,), x.numel() // x.shape[1])
        totals = all_reduce_both(torch.cat([x.sum(dims), rows]), group)
        count = totals[-1].detach()
        mean = totals[:-1] / count
        shape = [1, -1] + [1] * (x.dim() - 2)
        centred = x - mean.view(shape)
        variance = all_reduce_both(centred.square().sum(dims), group) / count
        # Running variances are unbiased in PyTorch, the normalization itself is biased.
        _update_statistics(self, mean, variance * (count / (count - 1)))
        out = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out

    return forward


@torch.no_grad()
def _update_statistics(norm: _BatchNorm, mean: torch.Tensor, unbiased: torch.Tensor) -> None:
    if not norm.training or norm.running_mean is None or norm.running_var is None:
        return
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    # Without a momentum the statistics are means over all batches so far.
    rate: Any = norm.momentum
    if rate is None:
        rate = 1.0 / norm.num_batches_tracked.to(mean.dtype)
    norm.running_mean.add_(rate * (mean - norm.running_mean))
    norm.running_var.add_(rate * (unbiased - norm.running_var))
