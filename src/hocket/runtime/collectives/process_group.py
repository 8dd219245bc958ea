"""A process group of torch.distributed whose collectives run over planned trees.

`all_reduce`, `broadcast`, `all_gather`, `reduce_scatter` and their single-tensor variants run over
the trees that were planned for the cluster's links, in the order of the calls. Each returns a
future, so DistributedDataParallel and FSDP run on this backend unchanged. Gloo runs everything
else: other operations and dtypes, sparse tensors, point to point, gather, scatter, all-to-all,
barriers. GPU tensors use NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.futures import Future

from hocket.base import config
from hocket.base.errors import UsageError
from hocket.hardware.cluster import Cluster
from hocket.plan.sections.communication import Collective
from hocket.runtime.collectives.rank_tables import ADDABLE
from hocket.runtime.collectives.tree_thread import CollectiveJob, TreeThread

PLANNED = "hocket"
"""The name of the backend."""
_HALVES = (torch.float16, torch.bfloat16)
"""Dtypes that are summed in float32 and rounded once."""
_ADDED = (*(getattr(torch, name) for name in ADDABLE), *_HALVES)
_ProcessGroup: Any = dist.ProcessGroup
"""Typed as Any, because torch's type stubs declare only one overload of each method."""
_Work: Any = dist.Work
_c10d: Any = torch._C._distributed_c10d
FindCluster = Callable[[str], Cluster]


class PlannedGroup(_ProcessGroup):  # type: ignore[misc]
    """Process group with collectives over planned trees; gloo or NCCL run everything else."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta,
        cluster: Callable[[], Cluster | None],
    ) -> None:  # fmt: skip
        """``cluster`` returns the known links, or None; its first devices are the ranks."""
        super().__init__(rank, size)
        self._inner: dict[str, Any] = {
            "cpu": dist.ProcessGroupGloo(_c10d.PrefixStore("gloo", store), rank, size, timeout)
        }
        # The base class passes methods that this class does not define to the device's backend.
        types = dist.ProcessGroup.BackendType
        self._register_backend(torch.device("cpu"), types.GLOO, self._inner["cpu"])
        if torch.cuda.is_available() and dist.is_nccl_available():
            self._inner["cuda"] = _nccl(_c10d.PrefixStore("nccl", store), rank, size, timeout)
            self._register_backend(torch.device("cuda"), types.NCCL, self._inner["cuda"])
        self.thread: TreeThread | None = None
        self._is_wide = config.sums_are_wide()
        if size > 1:
            known = _c10d.PrefixStore("hocket", store)
            self.thread = TreeThread(known, rank, size, cluster, timeout.total_seconds())

    # ── planned ──

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Sum tensors over all ranks."""
        opts = dist.AllreduceOptions() if opts is None else opts
        (tensor,) = _listed(tensors)
        if not self._can_add(tensor, opts.reduceOp):
            return self._inner_of(tensor).allreduce(_listed(tensors), opts)
        return self._put(
            "allreduce", 0, [tensor], lambda: self._addends(tensor),
            lambda data: _copy_back(tensor, data),
        )  # fmt: skip

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Send one rank's tensor to all ranks."""
        (tensor,) = _listed(tensors)
        if not self._can_move(tensor):
            return self._inner_of(tensor).broadcast(_listed(tensors), opts)
        return self._put(
            "broadcast", opts.rootRank, [tensor], lambda: _bytes(tensor),
            lambda data: _copy_bytes_back(tensor, data),
        )  # fmt: skip

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        """Send every rank's tensor to all ranks, into a list."""
        (outputs,), (tensor,) = output_tensors, _listed(input_tensors)
        same = all(t.nbytes == tensor.nbytes and self._can_move(t) for t in outputs)
        if not self._can_move(tensor) or not same or len(outputs) != self.size():
            return self._inner_of(tensor).allgather(output_tensors, _listed(input_tensors))

        def give(data: Any) -> None:
            for each, part in zip(outputs, data.tensor_split(self.size()), strict=True):
                _copy_bytes_back(each, part)

        return self._put("allgather", 0, outputs, lambda: self._gathered(tensor), give)

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        is_whole = output.nbytes == self.size() * tensor.nbytes
        if not (is_whole and self._can_move(output) and self._can_move(tensor)):
            return self._inner_of(tensor)._allgather_base(output, tensor)
        return self._put(
            "allgather", 0, [output], lambda: self._gathered(tensor),
            lambda data: _copy_bytes_back(output, data),
        )  # fmt: skip

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        """Sum lists of tensors over all ranks; each rank gets the sum of its own shard."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        (output,), (inputs,) = _listed(output_tensors), input_tensors
        if any((t.numel(), t.dtype, t.device) != (output.numel(), output.dtype, output.device)
               for t in inputs):  # fmt: skip
            inner = self._inner_of(output)
            return inner.reduce_scatter(_listed(output_tensors), input_tensors, opts)
        return self._reduce_scatter_base(output, torch.cat([t.reshape(-1) for t in inputs]), opts)

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        is_whole = (tensor.numel(), tensor.dtype) == (self.size() * output.numel(), output.dtype)
        if not (is_whole and all(self._can_add(t, opts.reduceOp) for t in (output, tensor))):
            return self._inner_of(tensor)._reduce_scatter_base(output, tensor, opts)

        def give(data: Any) -> None:
            count = output.numel()
            _copy_back(output, data[count * self.rank() : count * (self.rank() + 1)])

        return self._put("reducescatter", 0, [output], lambda: self._addends(tensor), give)

    # Newer PyTorch names of these methods.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    # ── what they share ──

    def _gathered(self, tensor: Any) -> Any:
        mine = _bytes(tensor)
        every = mine.new_empty(mine.numel() * self.size())
        every[self.rank() * mine.numel() : (self.rank() + 1) * mine.numel()] = mine
        return every

    def _addends(self, tensor: Any) -> Any:
        """Return a flat copy in the dtype of the sum."""
        dtype = tensor.dtype
        if self._is_wide and dtype == torch.float32:
            dtype = torch.float64
        elif dtype in _HALVES:
            dtype = torch.float32
        return tensor.detach().reshape(-1).to(dtype, copy=True)

    def _inner_of(self, tensor: Any) -> Any:
        return self._inner.get(tensor.device.type, self._inner["cpu"])

    def _can_move(self, tensor: Any) -> bool:
        is_host = tensor.device.type == "cpu" and tensor.layout == torch.strided
        return is_host and self.thread is not None

    def _can_add(self, tensor: Any, operation: Any) -> bool:
        return self._can_move(tensor) and tensor.dtype in _ADDED and operation == dist.ReduceOp.SUM

    def _put(
        self, collective: Collective, root: int, outputs: Sequence[Any],
        take: Callable[[], Any], give: Callable[[Any], None],
    ) -> Any:  # fmt: skip
        assert self.thread is not None
        future: Any = Future()

        def finish(data: np.ndarray[Any, Any]) -> None:
            with torch.no_grad():
                give(torch.from_numpy(data))
            future.set_result(list(outputs))

        def fail(error: BaseException) -> None:
            if not future.done():
                future.set_exception(RuntimeError(str(error)))

        self.thread.put(CollectiveJob(collective, root, lambda: take().numpy(), finish, fail))
        return _PlannedWork(future)

    # ── as torch asks ──

    def getBackendName(self) -> str:  # noqa: N802
        """Return the backend's name, for display."""
        return "hocket"

    def shutdown(self) -> None:
        """Finish all collectives and release the links."""
        if self.thread is not None:
            self.thread.close()
        if (gpus := self._inner.get("cuda")) is not None:
            gpus.shutdown()

    abort = shutdown


class _PlannedWork(_Work):  # type: ignore[misc]
    """Handle of a collective, whose `wait` raises errors; the one of torch hides them."""

    def __init__(self, future: Any) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective is done; raises its error."""
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """True if the collective is done."""
        return bool(self._future.done())

    def is_success(self) -> bool:
        """True if the collective is done without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the collective, or None."""
        try:
            self._future.value()
        except RuntimeError as error:
            return error
        return None

    def result(self) -> list[Any]:
        """Return the result tensors."""
        return list(self._future.wait())

    def get_future(self) -> Any:
        """Return the future, for `then` and for DistributedDataParallel."""
        return self._future


def register(find_cluster: FindCluster) -> None:
    """Register ``init_process_group("hocket")``, once."""
    # Torch adds an attribute for every registered backend.
    if hasattr(dist.Backend, PLANNED.upper()):
        return

    def create(given: Any, _: Any) -> PlannedGroup:
        # For the group of all ranks torch passes an empty list.
        members = list(given.global_ranks_in_group) or list(range(given.group_size))
        return PlannedGroup(
            given.store, given.group_rank, given.group_size, given.timeout,
            lambda: given_cluster(members, find_cluster),
        )  # fmt: skip

    dist.Backend.register_backend(PLANNED, create, extended_api=True, devices=["cpu", "cuda"])


def given_cluster(members: Sequence[int], find_cluster: FindCluster) -> Cluster | None:
    """Return the cluster of ``HOCKET_CLUSTER``, or None if the links must be measured.

    ``members`` are the global ranks of a group, whose devices come first in the result.
    """
    text = config.rank_cluster()
    if not text:
        return None
    cluster = find_cluster(text)
    if cluster.num_devices <= max(members):
        raise UsageError(
            f"HOCKET_CLUSTER has {cluster.num_devices} devices for {max(members) + 1} ranks",
            hint="write it anew with hocket probe, or leave it out",
            where=cluster.name,
        )
    others = [n for n in range(cluster.num_devices) if n not in set(members)]
    return replace(cluster, devices=tuple(cluster.devices[n] for n in (*members, *others)))


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _copy_back(tensor: Any, data: Any) -> None:
    tensor.detach().copy_(data.view(tensor.shape))


def _bytes(tensor: Any) -> Any:
    """Return a contiguous copy as bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return plain.clone().view(torch.uint8)


def _copy_bytes_back(tensor: Any, data: Any) -> None:
    # The strides of an empty byte array do not allow a view of another dtype.
    if tensor.numel():
        _copy_back(tensor, data.view(tensor.dtype))
