"""A process group of torch.distributed that carries out planned trees, beside gloo for the rest.

`all_reduce`, `broadcast`, `all_gather`, `reduce_scatter` and their forms on one tensor go over the
trees that were planned for these very links, in the order of the calls, each a future; so
DistributedDataParallel and FSDP run on it unchanged. What is not planned (other operations, other
numbers, sparse tensors, point to point, gather, scatter, all-to-all, barriers) gloo does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.futures import Future

from hocket.base import config
from hocket.base.errors import UsageError
from hocket.hardware.cluster import Cluster
from hocket.planners.communication.certificate import Collective
from hocket.runtime.collectives.layout import KINDS
from hocket.runtime.collectives.worker import CollectiveJob, CollectiveWorker

PLANNED = "hocket"
"""The name of the backend."""
_ADDED = tuple(getattr(torch, name) for name in KINDS)
_ProcessGroup: Any = dist.ProcessGroup
"""Its types name one of several forms of each method."""
_Work: Any = dist.Work
_c10d: Any = torch._C._distributed_c10d
FindCluster = Callable[[str], Cluster]


class PlannedGroup(_ProcessGroup):  # type: ignore[misc]
    """Collectives over packed trees; everything else by the ``inner`` group."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, find_cluster: FindCluster
    ) -> None:
        super().__init__(rank, size)
        inner: Any = dist.ProcessGroupGloo(_c10d.PrefixStore("gloo", store), rank, size, timeout)
        self.inner = inner
        # What this class does not define the base class hands to the backend of the device.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, inner)
        self.worker: CollectiveWorker | None = None
        self._is_wide = config.sums_are_wide()
        if size > 1:
            known = _c10d.PrefixStore("hocket", store)
            self.worker = CollectiveWorker(
                known, rank, size, lambda: given_cluster(size, find_cluster)
            )

    # ── planned ──

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Sums over all ranks."""
        opts = dist.AllreduceOptions() if opts is None else opts
        (tensor,) = _listed(tensors)
        if not self._can_add(tensor, opts.reduceOp):
            return self.inner.allreduce(_listed(tensors), opts)
        wide = self._is_summed_wide(tensor)
        return self._put(
            "allreduce", 0, [tensor], lambda: _flat(tensor, wide),
            lambda data: _copy_back(tensor, data),
        )  # fmt: skip

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Sums over all ranks, of several tensors as one."""
        given = _listed(tensors)
        opts = dist.AllreduceCoalescedOptions() if opts is None else opts
        if len({t.dtype for t in given}) != 1 or not all(
            self._can_add(t, opts.reduceOp) for t in given
        ):
            return self.inner.allreduce_coalesced(given, opts)
        wide = self._is_summed_wide(given[0])

        def take() -> np.ndarray[Any, Any]:
            return np.concatenate([_flat(tensor, wide) for tensor in given])

        def give(data: np.ndarray[Any, Any]) -> None:
            ends = np.cumsum([tensor.numel() for tensor in given])
            for tensor, part in zip(given, np.split(data, ends[:-1]), strict=True):
                _copy_back(tensor, part)

        return self._put("allreduce", 0, given, take, give)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """One rank's tensor to all."""
        (tensor,) = _listed(tensors)
        if not self._can_move(tensor):
            return self.inner.broadcast(_listed(tensors), opts)
        return self._put(
            "broadcast", opts.rootRank, [tensor], lambda: _bytes(tensor),
            lambda data: _copy_bytes_back(tensor, data),
        )  # fmt: skip

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        """Every rank's tensor to all, into a list."""
        (outputs,), (tensor,) = output_tensors, _listed(input_tensors)
        same = all(t.nbytes == tensor.nbytes and self._can_move(t) for t in outputs)
        if not self._can_move(tensor) or not same:
            return self.inner.allgather(output_tensors, _listed(input_tensors))

        def give(data: np.ndarray[Any, Any]) -> None:
            for each, part in zip(outputs, np.split(data, self.size()), strict=True):
                _copy_bytes_back(each, part)

        return self._put("allgather", 0, outputs, lambda: self._gathered(tensor), give)

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        if not (self._can_move(output) and self._can_move(tensor)):
            return self.inner._allgather_base(output, tensor)
        return self._put(
            "allgather", 0, [output], lambda: self._gathered(tensor),
            lambda data: _copy_bytes_back(output, data),
        )  # fmt: skip

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        """Sums over all ranks, each rank's part to it, from a list."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        (output,), (inputs,) = _listed(output_tensors), input_tensors
        if not all(self._can_add(t, opts.reduceOp) for t in (output, *inputs)) or any(
            t.numel() != output.numel() for t in inputs
        ):
            return self.inner.reduce_scatter(_listed(output_tensors), input_tensors, opts)
        wide = self._is_summed_wide(output)
        return self._scattered(output, lambda: np.concatenate([_flat(t, wide) for t in inputs]))

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        if not (self._can_add(output, opts.reduceOp) and self._can_add(tensor, opts.reduceOp)):
            return self.inner._reduce_scatter_base(output, tensor, opts)
        wide = self._is_summed_wide(output)
        return self._scattered(output, lambda: _flat(tensor, wide))

    # Newer names of the same.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    # ── what they share ──

    def _scattered(self, output: Any, take: Callable[[], np.ndarray[Any, Any]]) -> Any:
        def give(data: np.ndarray[Any, Any]) -> None:
            _copy_back(output, np.split(data, self.size())[self.rank()])

        return self._put("reducescatter", 0, [output], take, give)

    def _gathered(self, tensor: Any) -> np.ndarray[Any, Any]:
        mine = _bytes(tensor)
        every = np.empty(len(mine) * self.size(), dtype=np.uint8)
        every[self.rank() * len(mine) : (self.rank() + 1) * len(mine)] = mine
        return every

    def _is_summed_wide(self, tensor: Any) -> bool:
        return self._is_wide and tensor.dtype == torch.float32

    def _can_move(self, tensor: Any) -> bool:
        is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        return self.worker is not None and is_plain and tensor.is_contiguous()

    def _can_add(self, tensor: Any, operation: Any) -> bool:
        return self._can_move(tensor) and tensor.dtype in _ADDED and operation == dist.ReduceOp.SUM

    def _put(
        self, collective: Collective, root: int, outputs: Sequence[Any],
        take: Callable[[], np.ndarray[Any, Any]], give: Callable[[np.ndarray[Any, Any]], None],
    ) -> Any:  # fmt: skip
        assert self.worker is not None
        future: Any = Future()

        def finish(data: np.ndarray[Any, Any]) -> None:
            with torch.no_grad():
                give(data)
            future.set_result(list(outputs))

        def fail(error: BaseException) -> None:
            if not future.done():
                future.set_exception(RuntimeError(str(error)))

        self.worker.put(CollectiveJob(collective, root, take, finish, fail))
        return _PlannedWork(future)

    # ── as torch asks ──

    def getBackendName(self) -> str:  # noqa: N802
        """For people."""
        return "hocket"

    def shutdown(self) -> None:
        """Finish and let go of the links."""
        if self.worker is not None:
            self.worker.close()

    abort = shutdown


class _PlannedWork(_Work):  # type: ignore[misc]
    """What a call gives back; torch's own work of a future waits but keeps its error to itself."""

    def __init__(self, future: Any) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is done; raises where it failed."""
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether it is done."""
        return bool(self._future.done())

    def is_success(self) -> bool:
        """Whether it is done and nothing was wrong."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What was wrong."""
        try:
            self._future.value()
        except RuntimeError as error:
            return error
        return None

    def result(self) -> list[Any]:
        """The tensors."""
        return list(self._future.wait())

    def get_future(self) -> Any:
        """For `then`, and for DistributedDataParallel."""
        return self._future


def register(find_cluster: FindCluster) -> None:
    """Make ``init_process_group("hocket")`` known, once."""
    if hasattr(dist.Backend, PLANNED.upper()):
        return

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> PlannedGroup:
        return PlannedGroup(store, rank, size, timeout, find_cluster)

    dist.Backend.register_backend(PLANNED, create, devices=["cpu"])


def given_cluster(size: int, find_cluster: FindCluster) -> Cluster | None:
    """What the environment says the ranks are; None where they shall be measured."""
    text = config.rank_cluster()
    if not text:
        return None
    cluster = find_cluster(text)
    if cluster.num_devices < size:
        raise UsageError(
            f"HOCKET_CLUSTER has {cluster.num_devices} devices for {size} ranks",
            hint="write it anew with hocket probe, or leave it out",
            where=cluster.name,
        )
    return cluster


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _flat(tensor: Any, wide: bool) -> np.ndarray[Any, Any]:
    flat = tensor.detach().reshape(-1)
    copied: np.ndarray[Any, Any] = (flat.double() if wide else flat.clone()).numpy()
    return copied


def _copy_back(tensor: Any, data: np.ndarray[Any, Any]) -> None:
    tensor.detach().view(-1).copy_(torch.from_numpy(data))


def _bytes(tensor: Any) -> np.ndarray[Any, Any]:
    copied: np.ndarray[Any, Any] = _as_bytes(tensor).clone().numpy()
    return copied


def _copy_bytes_back(tensor: Any, data: np.ndarray[Any, Any]) -> None:
    _as_bytes(tensor).copy_(torch.from_numpy(data))


def _as_bytes(tensor: Any) -> Any:
    return tensor.detach().view(-1).view(torch.uint8)
