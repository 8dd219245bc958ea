"""Updates of blocks by the user's optimizer, on a thread of the host or on the device.

The host thread picks, among the blocks whose gradients have arrived on the host, the block that the
next forward pass needs first. The backward pass ends with the first block, so updates of later
blocks may still run during the next forward pass. A large block is updated in parts; after each
part the thread may switch to an earlier block.

On a GPU machine host updates of Adam, AdamW, SGD and Adagrad use PyTorch's fused kernels, which
read and write each value once, on all cores but one; the remaining core launches GPU kernels.
"""

from __future__ import annotations

import atexit
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hocket.base.errors import RunError, UsageError
from hocket.runtime.offload.copy_streams import DONE, CopyEvent
from hocket.runtime.offload.host_adam import fused_adam_step, is_fused_adam
from hocket.runtime.offload.memory_tracker import on_host
from hocket.runtime.offload.parameter_blocks import Block
from hocket.runtime.optimizer_parts import (
    group_of,
    has_fused_kernels,
    part_of,
    updates_in_parts,
)
from hocket.runtime.process_settings import torch_threads
from hocket.simulate.rewriting.host_parameters import PIECE_BYTES, runs_within

_CORES_FOR_LAUNCHES = 1
"""Cores reserved for kernel launches: a GPT on an H200 with 16 cores trains 5 % slower with 14
update threads than with 15, and no faster with 16."""
_MIN_FUSED_ELEMENTS = 2**16
"""Parameters with fewer elements are updated in one call, because splitting each one among threads
takes longer."""


# ── the thread ───────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class _HostJob:
    """Work for a block that starts after a copy; it runs in one go or in several parts."""

    index: int
    """Index of the block; blocks with lower indices are updated first."""
    done: threading.Event
    after: CopyEvent
    work: Callable[[], Iterator[None] | None]
    """Does all of the work, or returns an iterator that does one part per iteration."""
    _parts: Iterator[None] | None = None

    def advance(self) -> bool:
        """Run the next part; return True if there may be more."""
        if self._parts is None:
            self._parts = self.work()
        if not isinstance(self._parts, Iterator):
            return False
        return next(self._parts, _END) is not _END


_END = object()
_AFTER_ALL = sys.maxsize
"""Index of a job that belongs to no block and runs after the jobs of all blocks."""
_POLL_S = 0.05
"""Interval in seconds of checks whether the thread is alive."""
_Jobs = queue.SimpleQueue[_HostJob | None]
"""Queue of jobs in the order of submission; None ends the thread."""


class HostOptimizerThread:
    """Thread that accumulates gradients and updates blocks on the host; it ends with this
    object."""

    def __init__(self, *, is_dry_run: bool) -> None:
        """Create the queue; the thread starts with the first job. A dry run ignores all jobs."""
        self._is_dry_run = is_dry_run
        self._jobs: _Jobs = queue.SimpleQueue()
        self._failures: dict[int, BaseException] = {}
        """Errors of jobs, by index of the block."""
        self._thread: threading.Thread | None = None

    def submit(
        self, block: Block, work: Callable[[], Iterator[None] | None], after: CopyEvent = DONE
    ) -> None:
        """Queue work for a block, to start after a copy; sets `Block.update_done` at its end."""
        if self._is_dry_run:
            return
        self.wait(block)
        # A forked process has none of its parent's threads.
        if self._thread is None or not self._thread.is_alive():
            self._start()
        # After `clear` other threads wait for this job: an error before `put` would block them.
        block.update_done.clear()
        self._jobs.put(_HostJob(block.index, block.update_done, after, work))

    def wait(self, block: Block) -> None:
        """Wait until a block has no running job; raises the error of its last job."""
        # In a forked process the event of a job of the parent's thread would never be set.
        while not block.update_done.wait(_POLL_S):
            is_over = self._thread is None or not self._thread.is_alive()
            if is_over and not block.update_done.is_set():
                raise RunError(
                    f"an update of {block.policy.name!r} was under way on the host when this "
                    "process was forked, and does not continue here",
                    hint="call train.state_dict(), which waits for updates, before the fork",
                )
        if block.index in self._failures:
            raise self._failures.pop(block.index)

    def _start(self) -> None:
        self._jobs = queue.SimpleQueue()
        num_threads, is_ready = torch.get_num_threads(), threading.Event()
        # The thread holds jobs only, so that this object can be collected while it runs.
        thread = threading.Thread(
            target=_run, args=(self._jobs, self._failures, is_ready), daemon=True,
            name="hocket-updates",
        )  # fmt: skip
        thread.start()
        self._thread = thread
        _running[thread] = self._jobs
        is_ready.wait()
        # `end_all` stops the thread at exit; the finalizer is for owners collected before.
        weakref.finalize(self, self._jobs.put, None).atexit = False
        # The number of threads that one thread sets is the default of threads that start later.
        torch.set_num_threads(num_threads)


_running: weakref.WeakKeyDictionary[threading.Thread, _Jobs] = weakref.WeakKeyDictionary()


def wait_for_all() -> None:
    """Wait for all queued jobs, so that the models and tensors that they refer to can be freed."""
    for thread, jobs in list(_running.items()):
        is_done = threading.Event()
        jobs.put(_HostJob(_AFTER_ALL, is_done, DONE, lambda: None))
        while thread.is_alive() and not is_done.wait(_POLL_S):
            pass


@atexit.register
def end_all() -> None:
    """Stop every thread once its current part of an update is done.

    Python aborts daemon threads at exit, possibly in the midst of an update.
    """
    for thread, jobs in list(_running.items()):
        jobs.put(None)
        thread.join()


def threads_for_updates() -> AbstractContextManager[None]:
    """Return a context in which torch leaves one core free for kernel launches."""
    return torch_threads(max(1, torch.get_num_threads() - _CORES_FOR_LAUNCHES))


def _run(jobs: _Jobs, failures: dict[int, BaseException], is_ready: threading.Event) -> None:
    with threads_for_updates():
        is_ready.set()
        waiting: deque[_HostJob] = deque()
        while (job := _next(jobs, waiting)) is not None:
            done = job.done
            try:
                if job.advance():
                    continue
            # `HostOptimizerThread.wait` raises it.
            except BaseException as error:
                failures[job.index] = error
            # References are dropped before the event, so that the waiting thread can free tensors.
            waiting.remove(job)
            del job
            done.set()


def _next(jobs: _Jobs, waiting: deque[_HostJob]) -> _HostJob | None:
    """Return the job with the lowest block index among jobs whose copies are complete.

    None ends the thread. Jobs are queued long before the device has computed their gradients, so
    waiting for the lowest index of all would mean waiting for the end of the backward pass.
    """
    while not jobs.empty() or not waiting:
        job = jobs.get()
        if job is None:
            return None
        waiting.append(job)
    # Copies complete in the order of submission.
    waiting[0].after.synchronize()
    ready = list(takewhile(lambda job: job.after.is_done, waiting))
    return min(ready, key=lambda job: job.index)


# ── updates on the host ──────────────────────────────────────────────────────────────────────────


def host_step(block: Block, part: torch.optim.Optimizer) -> Iterator[None]:
    """Update a block's master copy on the host, a few parameters per iteration.

    ``part`` is the user's optimizer, restricted to the block's master copies.
    """
    sizes = [place.num_bytes for place in block.master_layout.places]
    for number, (start, stop) in enumerate(runs_within(sizes, PIECE_BYTES)):
        if number:
            yield
        _step_some(block, part, slice(start, stop))


def _step_some(block: Block, part: torch.optim.Optimizer, chosen: slice) -> None:
    places = block.master_layout.places[chosen]
    gradients = block.host_gradients
    left = {p.parameter: gradients[p.parameter] for p in places if p.parameter in gradients}
    for parameter in _fused_steps(block, part, chosen):
        del left[parameter]
    if not left:
        return
    masters = [block.masters[parameter] for parameter in left]
    for master, gradient in zip(masters, left.values(), strict=True):
        master.grad = gradient.to(master.dtype)
    # `part.step` would also update parameters that are done already or have no gradient yet.
    own = part if len(left) == len(block.parameters) else part_of(part, {m: m for m in masters})
    own.step()
    for master in masters:
        master.grad = None
    block.refresh_upload(left)


def _fused_steps(
    block: Block, part: torch.optim.Optimizer, chosen: slice
) -> Iterator[nn.Parameter]:
    """Update and cast the parameters that `host_adam` supports in one pass; yield each of them."""
    assert block.upload is not None
    if block.upload is block.master or not is_fused_adam(part):
        return
    groups = {parameter: group for group in part.param_groups for parameter in group["params"]}
    for place in block.upload_layout.places[chosen]:
        parameter, master = place.parameter, block.masters[place.parameter]
        gradient = block.host_gradients.get(parameter)
        if gradient is None or gradient.numel() < _MIN_FUSED_ELEMENTS:
            continue
        low_precision = place.of(block.upload)
        if fused_adam_step(groups[master], part.state[master], master, gradient, low_precision):
            yield parameter


# ── steps of parts ───────────────────────────────────────────────────────────────────────────────


class OptimizerSteps:
    """Runs steps of the user's optimizer for blocks: on the host, on the device, or in a dry
    run."""

    def __init__(self, device: torch.device, *, is_real: bool, is_dry_run: bool) -> None:
        """Use fused kernels if ``is_real``, because they allocate no temporaries."""
        self._device, self._is_real, self._is_dry_run = device, is_real, is_dry_run
        self._known_groups: list[tuple[int, int]] = []
        """Id and length of each of the optimizer's parameter lists when states were last placed."""

    def place_states(
        self, optimizer: torch.optim.Optimizer | None, blocks: Sequence[Block]
    ) -> None:
        """Move each optimizer state to the device or the host, wherever its block is updated.

        Refuses parameters added to the model after `hocket.prepare`, because no block would update
        them.
        """
        groups = [] if optimizer is None else [group["params"] for group in optimizer.param_groups]
        lists = [(id(parameters), len(parameters)) for parameters in groups]
        if not lists or lists == self._known_groups:
            return
        known = {parameter for block in blocks for parameter in block.parameters}
        for parameter in (p for parameters in groups for p in parameters):
            if parameter not in known:
                raise UsageError(
                    f"the optimizer has a parameter {list(parameter.shape)} that the model did not "
                    "have when it was prepared",
                    hint="call hocket.prepare again after the model was changed",
                )
        self._known_groups = lists
        assert optimizer is not None
        for block in blocks:
            place = self._device if block.master is None else torch.device("cpu")
            for parameter in block.parameters:
                _move_state(optimizer.state.get(parameter, {}), place)

    def forget_places(self) -> None:
        """Make the next `place_states` check all states, because they may have been moved."""
        self._known_groups = []

    def on_host(self, optimizer: torch.optim.Optimizer, block: Block) -> torch.optim.Optimizer:
        """Return the optimizer restricted to a block's master copy."""
        return part_of(optimizer, block.masters, fused=self._is_real)

    def on_device(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
    ) -> torch.optim.Optimizer:
        """Return the optimizer restricted to parameters on the device."""
        if self._is_real and has_fused_kernels(optimizer):
            for parameter in parameters:
                # Fused kernels read step counters on the device.
                states = optimizer.state.get(parameter, {})
                for key, value in states.items():
                    if isinstance(value, torch.Tensor) and not value.dim():
                        states[key] = value.to(parameter.device)
        part = part_of(optimizer, {p: p for p in parameters}, fused=self._is_real)
        if self._is_real and torch.cuda.is_current_stream_capturing():
            for group in part.param_groups:
                # Optimizers refuse a capture otherwise.
                group |= {"capturable": True} if "capturable" in group else {}
        return part

    def step_on_device(self, part: torch.optim.Optimizer) -> None:
        """Run an update on the device; a dry run skips fused kernels, which allocate nothing."""
        is_fused = self._device.type == "cuda" and has_fused_kernels(part)
        if not (self._is_dry_run and is_fused):
            self._step(part)

    def step_whole(self, optimizer: torch.optim.Optimizer) -> None:
        """Run a step of the entire optimizer; a dry run skips it if no parameter has a gradient."""
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        if not self._is_dry_run or any(p.grad is not None for p in trained):
            self._step(optimizer)

    def _step(self, part: torch.optim.Optimizer) -> None:
        # The host reads step counters, so they are real tensors in a dry run, too.
        with unset_fake_temporarily() if self._is_dry_run else nullcontext():
            part.step()

    def make_states(self, optimizer: torch.optim.Optimizer, blocks: Sequence[Block]) -> None:
        """Create states on the device and states to be swapped in, as a first optimizer step
        would."""
        if not updates_in_parts(optimizer):
            self._make_whole_state(optimizer, [b for b in blocks if b.master is None])
            return
        resident = [block for block in blocks if block.master is None]
        self._make_states(optimizer, {p: p for block in resident for p in block.parameters})
        with on_host():
            swapped = [block.masters for block in blocks if block.updates_on_device]
            self._make_states(optimizer, {p: m for masters in swapped for p, m in masters.items()})

    def _make_whole_state(self, optimizer: torch.optim.Optimizer, blocks: Sequence[Block]) -> None:
        trained = [p for block in blocks for p in block.parameters if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        self.step_whole(optimizer)
        for parameter in trained:
            parameter.grad = None

    def _make_states(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[nn.Parameter, nn.Parameter]
    ) -> None:
        """Create states by an update of one parameter per layout.

        Other parameters with that layout get states of the same form: the update of a parameter
        depends on that parameter alone.
        """
        alike: dict[Any, list[nn.Parameter]] = {}
        groups = group_of(optimizer, parameters)
        for parameter, updated in parameters.items():
            if parameter.requires_grad:
                layout = (updated.shape, updated.stride(), updated.dtype, updated.device)
                alike.setdefault((groups.get(parameter), *layout), []).append(parameter)
        firsts = {p: parameters[p] for p, *_ in alike.values()}
        for updated in firsts.values():
            updated.grad = torch.zeros_like(updated)
        self._step(part_of(optimizer, firsts))
        for updated in firsts.values():
            updated.grad = None
        for first, *others in alike.values():
            for parameter in others if first in optimizer.state else ():
                optimizer.state[parameter] = {
                    key: self._state_like(value) for key, value in optimizer.state[first].items()
                }

    def _state_like(self, state: Any) -> Any:
        if not isinstance(state, torch.Tensor):
            return state
        if state.dim():
            return torch.empty_like(state)
        # Step counters are on the host.
        with on_host(), unset_fake_temporarily() if self._is_dry_run else nullcontext():
            return state.clone()


def _move_state(states: MutableMapping[str, Any], place: torch.device) -> None:
    """Move the states of one parameter to the device or the host, where it is updated."""
    for key, value in states.items():
        # Step counters stay on the host until fused kernels want them on the device.
        is_counter = isinstance(value, torch.Tensor) and not value.dim()
        if isinstance(value, torch.Tensor) and not (is_counter and place.type == "cuda"):
            with on_host() if place.type == "cpu" else nullcontext():
                states[key] = value.to(place)
