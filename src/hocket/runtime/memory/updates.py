"""Updates of single blocks by the person's own optimizer, on the device or by a thread on the host.

A block's update is a step of an optimizer that is the person's own but for its parameters: state,
settings and class are shared, so any optimizer works whose update of a parameter looks at that
parameter alone. Of the blocks whose gradients have come, the one is updated that the next forward
pass needs first: gradients of the first block come last, and what is left of the later blocks is
updated while the next forward pass runs. A large block is updated in parts, between which a lower
one that has come goes first. On a GPU the host's updates of Adam, AdamW, SGD and
Adagrad take PyTorch's fused kernels, which read and write everything once, with all cores but one:
a team of threads waits for its slowest member, and whoever starts the device's work would take its
core away.
"""

from __future__ import annotations

import atexit
import queue
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import nn

from hocket.base.errors import RunError
from hocket.runtime.memory.blocks import Block
from hocket.runtime.memory.copies import DONE, Ticket
from hocket.runtime.memory.versions import own_optimizers
from hocket.runtime.threads import torch_threads

_CORES_FOR_OTHERS = 1
"""That of the thread which keeps the device busy; a GPT on an H200 with 16 cores trains 5 % slower
with 14 threads for updates than with 15, and no faster with 16."""
_UPDATE_IN_PARTS = ("torch", "transformers", "bitsandbytes")
"""Packages whose optimizers update every parameter by itself."""
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def has_fused_kernels(optimizer: torch.optim.Optimizer) -> bool:
    """True if PyTorch updates all parameters of such an optimizer in one kernel."""
    return type(optimizer) in _FUSED


def counters_beside(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Have counters of steps where their parameters are, as fused kernels want them."""
    for parameter in parameters:
        states = optimizer.state.get(parameter, {})
        for key, value in states.items():
            if isinstance(value, torch.Tensor) and not value.dim():
                states[key] = value.to(parameter.device)


def updates_in_parts(optimizer: torch.optim.Optimizer) -> bool:
    """True if the update of a parameter looks at that parameter alone, and nothing looks on.

    Optimizers of unknown packages may take norms over all parameters; a hook of an optimizer, or a
    function in the place of its ``step``, runs once per step and sees all gradients.
    """
    step = vars(optimizer).get("step")
    is_plain = step is None or hasattr(step, "_wrapped_by_lr_sched")
    is_hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    package = type(optimizer).step.__module__.partition(".")[0]
    return is_plain and not is_hooked and package in _UPDATE_IN_PARTS


def without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer with the settings that it has now, and with no groups or states yet."""
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    # A scheduler counts steps of the whole optimizer by a function that it puts here.
    made.__dict__.pop("step", None)
    # Hooks are of the whole optimizer's step, too: see `updates_in_parts`.
    made._optimizer_step_pre_hooks = OrderedDict()
    made._optimizer_step_post_hooks = OrderedDict()
    made.param_groups, made.state = [], defaultdict(dict)
    own_optimizers.add(made)
    return made


def part_of(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[nn.Parameter, nn.Parameter],
    *,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer with these parameters alone, and the settings that it has now.

    ``parameters`` says for each which one is updated in its place, with its state.
    """
    part = without_parameters(optimizer)
    settings: dict[str, Any] = {}
    if fused and has_fused_kernels(optimizer):
        settings = {"fused": True, "foreach": False}
    part.param_groups = [{**group, "params": [], **settings} for group in optimizer.param_groups]
    groups = group_of(optimizer, parameters)
    for parameter, updated in parameters.items():
        if parameter in groups:
            part.state[updated] = optimizer.state[parameter]
            part.param_groups[groups[parameter]]["params"].append(updated)
    return part


class _Groups(NamedTuple):
    """Where the parameters of an optimizer were when they were looked for."""

    lists: list[tuple[list[nn.Parameter], int]]
    group_of: dict[nn.Parameter, int]


_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Groups] = weakref.WeakKeyDictionary()


def group_of(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]
) -> dict[nn.Parameter, int]:
    """In which group of the optimizer each parameter is. There are many blocks, and each would go
    through all parameters; they are gone through again where groups changed, or one is missed."""
    lists = [(group["params"], len(group["params"])) for group in optimizer.param_groups]
    known = _known.get(optimizer)
    is_same = known is not None and len(known.lists) == len(lists) and all(
        params is before and count == number
        for (params, count), (before, number) in zip(lists, known.lists, strict=True)
    )  # fmt: skip
    if known is None or not is_same or any(p not in known.group_of for p in parameters):
        known = _Groups(lists, {p: n for n, (params, _) in enumerate(lists) for p in params})
        _known[optimizer] = known
    return known.group_of


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
