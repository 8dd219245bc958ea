"""Steps of an optimizer for some of its parameters: on the host, on the device, or rehearsed."""

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
from hocket.runtime.offload.copy_streams import DONE, Ticket
from hocket.runtime.offload.host_adam import is_one_pass, update_rounded
from hocket.runtime.offload.memory_tracker import on_host
from hocket.runtime.offload.optimizer_parts import (
    counters_beside,
    group_of,
    has_fused_kernels,
    part_of,
    updates_in_parts,
)
from hocket.runtime.offload.parameter_blocks import Block
from hocket.runtime.threads import torch_threads
from hocket.simulate.rewriting.homes import PIECE_BYTES, runs_within

# Updates of single blocks by the person's own optimizer, on the device or by a thread on the host.
#
# A block's update is a step of an optimizer that is the person's own but for its parameters:
# state, settings and class are shared, so any optimizer works whose update of a parameter looks at
# that parameter alone. Of the blocks whose gradients have come, the one is updated that the next
# forward pass needs first: gradients of the first block come last, and what is left of the later
# blocks is updated while the next forward pass runs. A large block is updated in parts, between
# which a lower one that has come goes first. On a GPU the host's updates of Adam, AdamW, SGD and
# Adagrad take PyTorch's fused kernels, which read and write everything once, with all cores but
# one: a team of threads waits for its slowest member, and whoever starts the device's work would
# take its core away.


_CORES_FOR_OTHERS = 1
"""That of the thread which keeps the device busy; a GPT on an H200 with 16 cores trains 5 % slower
with 14 threads for updates than with 15, and no faster with 16."""


@dataclass(eq=False)
class HostJob:
    """What is done for a block when a copy has come, at once or in parts."""

    index: int
    """Of the block: a lower one goes first."""
    updated: threading.Event
    """Tells when it is done."""
    ticket: Ticket
    do: Callable[[], Iterator[None] | None]
    """Does everything, or gives an iterator that does a part at a time."""
    _parts: Iterator[None] | None = None

    def advance(self) -> bool:
        """Do the next part; whether there may be more."""
        if self._parts is None:
            self._parts = self.do()
        if not isinstance(self._parts, Iterator):
            return False
        return next(self._parts, _OVER) is not _OVER


_OVER = object()
_AFTER_ALL = sys.maxsize
"""In place of a block's index."""
_PATIENCE_S = 0.05
"""Between two looks whether a thread has ended."""
Jobs = queue.SimpleQueue[HostJob | None]
"""In the order of asking; None at the end."""


class HostUpdates:
    """A thread that does what blocks want done on the host: of what has come, the lowest block.

    It ends with this object: it knows of jobs alone.
    """

    def __init__(self, *, is_idle: bool) -> None:
        """An idle one does nothing: for rehearsals."""
        self._is_idle = is_idle
        self._jobs: Jobs = queue.SimpleQueue()
        self._failures: dict[int, BaseException] = {}
        """By the index of the block that it happened to."""
        self._thread: threading.Thread | None = None

    def ask(
        self, block: Block, do: Callable[[], Iterator[None] | None], after: Ticket = DONE
    ) -> None:
        """Do something for a block after a copy, at once or in parts; `Block.updated` tells when it
        is done."""
        if self._is_idle:
            return
        self.wait(block)
        # A process that was forked has none of the threads that there were.
        if self._thread is None or not self._thread.is_alive():
            self._start()
        # From here on somebody may wait for it: nothing that can fail comes before it is asked.
        block.updated.clear()
        self._jobs.put(HostJob(block.index, block.updated, after, do))

    def wait(self, block: Block) -> None:
        """Until nothing is under way for a block; raises what went wrong with it in the thread."""
        while not block.updated.wait(_PATIENCE_S):
            is_over = self._thread is None or not self._thread.is_alive()
            if is_over and not block.updated.is_set():
                raise RunError(
                    f"an update of {block.policy.name!r} was under way on the host when this "
                    "process was forked, and does not go on here",
                    hint="call train.state_dict(), which waits for updates, before the fork",
                )
        if block.index in self._failures:
            raise self._failures.pop(block.index)

    def _start(self) -> None:
        self._jobs = queue.SimpleQueue()
        before, is_ready = torch.get_num_threads(), threading.Event()
        thread = threading.Thread(
            target=_work, args=(self._jobs, self._failures, is_ready), daemon=True,
            name="hocket-updates",
        )  # fmt: skip
        thread.start()
        self._thread = thread
        _running[thread] = self._jobs
        is_ready.wait()
        weakref.finalize(self, self._jobs.put, None).atexit = False
        # What a thread sets for itself is also what threads that come later begin with.
        torch.set_num_threads(before)


_running: weakref.WeakKeyDictionary[threading.Thread, Jobs] = weakref.WeakKeyDictionary()


def wait_for_all() -> None:
    """Until what was asked for so far is done, for every training: a job holds its training, also
    one that nobody has any more."""
    for thread, jobs in list(_running.items()):
        is_done = threading.Event()
        jobs.put(HostJob(_AFTER_ALL, is_done, DONE, lambda: None))
        while thread.is_alive() and not is_done.wait(_PATIENCE_S):
            pass


@atexit.register
def end_all() -> None:
    """Let every thread end what it is at: Python would abort in the midst of an update."""
    for thread, jobs in list(_running.items()):
        jobs.put(None)
        thread.join()


def threads_for_updates() -> AbstractContextManager[None]:
    """As many threads as updates on the host take."""
    return torch_threads(max(1, torch.get_num_threads() - _CORES_FOR_OTHERS))


def _work(jobs: Jobs, failures: dict[int, BaseException], is_ready: threading.Event) -> None:
    with threads_for_updates():
        is_ready.set()
        _do_all(jobs, failures)


def _do_all(jobs: Jobs, failures: dict[int, BaseException]) -> None:
    asked: deque[HostJob] = deque()
    while (job := _next(jobs, asked)) is not None:
        updated = job.updated
        try:
            if job.advance():
                continue
        # It is raised where the block is waited for.
        except BaseException as error:
            failures[job.index] = error
        # Whoever is told finds that nothing of the training is held here any more.
        asked.remove(job)
        del job
        updated.set()


def _next(jobs: Jobs, asked: deque[HostJob]) -> HostJob | None:
    """Of the jobs whose copies have come and that are not over, that of the lowest block; None at
    the end.

    The device is far behind what it is asked for: whoever waited for the lowest of all blocks would
    wait for the end of the backward pass.
    """
    while not jobs.empty() or not asked:
        job = jobs.get()
        if job is None:
            return None
        asked.append(job)
    # Copies come in the order in which they were asked for.
    asked[0].ticket.synchronize()
    come = list(takewhile(lambda job: job.ticket.is_done, asked))
    return min(come, key=lambda job: job.index)


# The update of a block where it is at home on the host: in parts, each with its rounded twin.
#
# Parts are neighbouring parameters, or one large one. What AdamW's one pass over memory can do
# (`one_pass`) is done by it; everything else by the person's optimizer on gradients in full, and a
# second pass that rounds.


_SMALL = 2**16
"""Parameters of fewer elements are updated together: sharing out each among threads takes long."""


def step_at_home(block: Block, part: torch.optim.Optimizer) -> Iterator[None]:
    """A step of the gradients that wait at home, by the optimizer's part for this block."""
    sizes = [place.num_bytes for place in block.home_layout.places]
    for number, (start, stop) in enumerate(runs_within(sizes, PIECE_BYTES)):
        if number:
            yield
        _step(block, part, slice(start, stop))


def _step(block: Block, part: torch.optim.Optimizer, chosen: slice) -> None:
    places = block.home_layout.places[chosen]
    left = {p.parameter: block.pending[p.parameter] for p in places if p.parameter in block.pending}
    for parameter in _in_one_pass(block, part, chosen):
        del left[parameter]
    if not left:
        return
    twins = [block.twins[parameter] for parameter in left]
    for twin, gradient in zip(twins, left.values(), strict=True):
        twin.grad = gradient.to(twin.dtype)
    own = part if len(left) == len(block.parameters) else part_of(part, {t: t for t in twins})
    own.step()
    for twin in twins:
        twin.grad = None
    block.round(left)


def _in_one_pass(
    block: Block, part: torch.optim.Optimizer, chosen: slice
) -> Iterator[nn.Parameter]:
    """Update what can be updated and rounded at once."""
    assert block.copied is not None
    if block.copied is block.home or not is_one_pass(part):
        return
    groups = {parameter: group for group in part.param_groups for parameter in group["params"]}
    for place in block.copied_layout.places[chosen]:
        parameter, twin = place.parameter, block.twins[place.parameter]
        gradient = block.pending.get(parameter)
        if gradient is None or gradient.numel() < _SMALL:
            continue
        rounded = place.of(block.copied)
        if update_rounded(groups[twin], part.state[twin], twin, gradient, rounded):
            yield parameter


# Steps of an optimizer for some of its parameters: on the host, on the device, or rehearsed.


class PartSteps:
    """Parts of an optimizer, by fused kernels where ``is_real``, and their steps."""

    def __init__(self, device: torch.device, *, is_real: bool, is_rehearsal: bool) -> None:
        self._device, self._is_real, self._is_rehearsal = device, is_real, is_rehearsal
        self._looked: list[tuple[int, int]] = []
        """Lists of parameters that blocks were last found for, and how many each had."""

    def settle(self, optimizer: torch.optim.Optimizer | None, blocks: Sequence[Block]) -> None:
        """Have the states of an optimizer that was used before where the blocks are updated; refuse
        parameters that the model got after it was prepared, which no block would update."""
        groups = [] if optimizer is None else [group["params"] for group in optimizer.param_groups]
        lists = [(id(parameters), len(parameters)) for parameters in groups]
        if not lists or lists == self._looked:
            return
        known = {parameter for block in blocks for parameter in block.parameters}
        for parameter in (p for parameters in groups for p in parameters):
            if parameter not in known:
                raise UsageError(
                    f"the optimizer has a parameter {list(parameter.shape)} that the model did not "
                    "have when it was prepared",
                    hint="call hocket.prepare again after the model was changed",
                )
        self._looked = lists
        assert optimizer is not None
        for block in blocks:
            place = self._device if block.home is None else torch.device("cpu")
            for parameter in block.parameters:
                _bring(optimizer.state.get(parameter, {}), place)

    def forget(self) -> None:
        """Another training may have moved states: look again where they are."""
        self._looked = []

    def at_home(self, optimizer: torch.optim.Optimizer, block: Block) -> torch.optim.Optimizer:
        """The part that updates a block on the host."""
        return part_of(optimizer, block.twins, fused=self._is_real)

    def here(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
    ) -> torch.optim.Optimizer:
        """Of parameters on the device; fused kernels hold nothing beside what they change."""
        if self._is_real and has_fused_kernels(optimizer):
            counters_beside(optimizer, parameters)
        part = part_of(optimizer, {p: p for p in parameters}, fused=self._is_real)
        if self._is_real and torch.cuda.is_current_stream_capturing():
            for group in part.param_groups:
                # Optimizers want to be told.
                group |= {"capturable": True} if "capturable" in group else {}
        return part

    def step_here(self, part: torch.optim.Optimizer) -> None:
        """An update on the device, of which a rehearsal sees what it holds."""
        is_fused = self._device.type == "cuda" and has_fused_kernels(part)
        if not (self._is_rehearsal and is_fused):
            self._step(part)

    def step_whole(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of the optimizer itself; a dry run has gradients on the device only."""
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        if not self._is_rehearsal or any(p.grad is not None for p in trained):
            self._step(optimizer)

    def _step(self, part: torch.optim.Optimizer) -> None:
        # Counters of steps are read by the host, so that they are real in a rehearsal, too.
        with unset_fake_temporarily() if self._is_rehearsal else nullcontext():
            part.step()

    def make_states(self, optimizer: torch.optim.Optimizer, blocks: Sequence[Block]) -> None:
        """Have the states that come to or stay on the device, as after a first step."""
        if not updates_in_parts(optimizer):
            self._make_whole_state(optimizer, [b for b in blocks if b.home is None])
            return
        self._make_states(optimizer, {p: p for b in blocks if b.home is None for p in b.parameters})
        with on_host():
            visiting = [block.twins for block in blocks if block.is_updated_here]
            self._make_states(
                optimizer, {p: twin for twins in visiting for p, twin in twins.items()}
            )

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
        """The update of a parameter looks at it alone: of those that look alike one is updated, and
        the states of the others are like its own."""
        alike: dict[Any, list[nn.Parameter]] = {}
        groups = group_of(optimizer, parameters)
        for parameter, updated in parameters.items():
            if parameter.requires_grad:
                look = (updated.shape, updated.stride(), updated.dtype, updated.device)
                alike.setdefault((groups.get(parameter), *look), []).append(parameter)
        firsts = {p: parameters[p] for p, *_ in alike.values()}
        for updated in firsts.values():
            updated.grad = torch.zeros_like(updated)
        self._step(part_of(optimizer, firsts))
        for updated in firsts.values():
            updated.grad = None
        for first, *others in alike.values():
            for parameter in others if first in optimizer.state else ():
                optimizer.state[parameter] = {
                    key: self._like(value) for key, value in optimizer.state[first].items()
                }

    def _like(self, state: Any) -> Any:
        if not isinstance(state, torch.Tensor):
            return state
        if state.dim():
            return torch.empty_like(state)
        # Counters of steps are the host's.
        with on_host(), unset_fake_temporarily() if self._is_rehearsal else nullcontext():
            return state.clone()


def _bring(states: MutableMapping[str, Any], place: torch.device) -> None:
    """The states of one parameter, to where it is updated."""
    for key, value in states.items():
        # Counters of steps are the host's, until fused kernels of the device want them.
        is_counter = isinstance(value, torch.Tensor) and not value.dim()
        if isinstance(value, torch.Tensor) and not (is_counter and place.type == "cuda"):
            with on_host() if place.type == "cpu" else nullcontext():
                states[key] = value.to(place)
