"""Updates of single blocks by the person's own optimizer, on the device or by a thread on the host.

A block's update is a step of an optimizer that is the person's own but for its parameters: state,
settings and class are shared, so any optimizer works whose update of a parameter looks at that
parameter alone. Blocks are updated in the order in which the next forward pass will need them,
lowest first: the gradients of the first block come last, and the later blocks are updated while the
next forward pass runs. On a GPU the host's updates of Adam, AdamW, SGD and Adagrad take PyTorch's
fused kernels, which read and write everything once, with all cores but two: a team of threads waits
for its slowest member, and whoever starts the device's work would take its core away.
"""

from __future__ import annotations

import math
import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hocket.runtime.memory.blocks import Block

_CORES_FOR_OTHERS = 2
"""Those of the forward and of the backward pass, which keep the device busy."""
Jobs = queue.PriorityQueue[tuple[float, int, tuple[Block, Callable[[], None]] | None]]
"""Lowest block first, of one block in the order of asking."""
_LAST = (math.inf, 0, None)
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def part_of(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[nn.Parameter, nn.Parameter],
    *,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer with these parameters alone, and the settings that it has now.

    ``parameters`` says for each which one is updated in its place, with its state.
    """
    part: torch.optim.Optimizer = object.__new__(type(optimizer))
    part.__dict__.update(optimizer.__dict__)
    # A scheduler counts steps of the whole optimizer by a function that it puts here.
    part.__dict__.pop("step", None)
    settings: dict[str, Any] = {}
    if fused and type(optimizer) in _FUSED:
        settings = {"fused": True, "foreach": False}
    part.state = defaultdict(dict)
    part.param_groups = []
    for group in optimizer.param_groups:
        here = [p for p in group["params"] if p in parameters]
        for parameter in here:
            part.state[parameters[parameter]] = optimizer.state[parameter]
        own = {"params": [parameters[parameter] for parameter in here], **settings}
        part.param_groups.append({**group, **own})
    return part


class HostUpdates:
    """A thread that does what blocks want done on the host, lowest block first.

    It ends with this object: it knows of jobs alone.
    """

    def __init__(self, *, is_idle: bool) -> None:
        """An idle one does nothing: for rehearsals."""
        self._is_idle = is_idle
        self._jobs: Jobs = queue.PriorityQueue()
        self._count = 0
        self._failures: list[BaseException] = []
        self._thread: threading.Thread | None = None

    def ask(self, block: Block, job: Callable[[], None]) -> None:
        """Do something for a block; `Block.updated` tells when it is done."""
        if self._is_idle:
            return
        self.wait(block)
        block.updated.clear()
        self._count += 1
        if self._thread is None:
            self._start()
        self._jobs.put((block.index, self._count, (block, job)))

    def wait(self, block: Block) -> None:
        """Until nothing is under way for a block; raises what went wrong in the thread."""
        block.updated.wait()
        if self._failures:
            raise self._failures.pop()

    def _start(self) -> None:
        before, is_ready = torch.get_num_threads(), threading.Event()
        self._thread = threading.Thread(
            target=_work, args=(self._jobs, self._failures, is_ready), daemon=True,
            name="hocket-updates",
        )  # fmt: skip
        self._thread.start()
        is_ready.wait()
        weakref.finalize(self, self._jobs.put, _LAST).atexit = False
        # What a thread sets for itself is also what threads that come later begin with.
        torch.set_num_threads(before)


def _work(jobs: Jobs, failures: list[BaseException], is_ready: threading.Event) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() - _CORES_FOR_OTHERS))
    is_ready.set()
    while (asked := jobs.get()[2]) is not None:
        block, job = asked
        try:
            job()
        # It is raised where the block is waited for.
        except BaseException as error:
            failures.append(error)
        finally:
            block.updated.set()
        # Nothing of a training is held while the next job is waited for.
        del asked, block, job
