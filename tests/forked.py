"""Ranks forked from a process that has imported PyTorch, which takes seconds, once for all tests.

For tests that ask something of ranks and nothing of how Python starts. The fork server of the
standard library computes nothing and has no threads, so what is forked from it is as good as new.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from ports import reserved_port

from hocket.hardware import detect
from hocket.processes import system

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch._dynamo", "tests.warm"])
"""The second is found where tests are started in the folder of the project."""


class Descriptor:
    """A descriptor that goes along to what is forked; there it is a number again."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _taken, (reduction.DupFd(self.number),)


def _taken(given: Any) -> int:
    return int(given.detach())


def rates() -> tuple[tuple[float, float], float]:
    """What was measured of this processor, for those that are forked to take."""
    return detect._measured(), detect.measure_update_bps()


def take_rates(known: tuple[tuple[float, float], float]) -> None:
    """Measure nothing in this process, which lives for one test."""
    detect._measured = lambda: known[0]  # type: ignore[assignment]
    detect.measure_update_bps = lambda: known[1]  # type: ignore[assignment]


class Rank(NamedTuple):
    """A rank that runs; what its function tells or returns comes through ``words``."""

    process: BaseProcess
    words: Connection

    def hear(self) -> Any:
        """What it tells next; fails with its traceback where it raised something."""
        what, said = self._next()
        assert what == "told", said
        return said

    def hear_failure(self) -> str:
        """The traceback with which it ends."""
        while (heard := self._next())[0] == "told":
            continue
        return str(heard[1])

    def _next(self) -> tuple[str, Any]:
        try:
            heard: tuple[str, Any] = self.words.recv()
        except EOFError:
            return "failed", f"{self.process.name} has died"
        return heard


@contextlib.contextmanager
def ranks(
    count: int, function: Callable[..., Any], *arguments: Any, **variables: str
) -> Iterator[list[Rank]]:
    """``function(tell, *arguments)`` in each rank, with torchrun's variables and these.

    What is given to ``tell``, and at last what the function returns, is heard here. All ranks are
    killed at the end.
    """
    started = []
    with reserved_port() as port:
        try:
            for rank in range(count):
                ours, theirs = CONTEXT.Pipe(duplex=False)
                given = {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "lo", **variables,
                }  # fmt: skip
                process = CONTEXT.Process(
                    target=_live, args=(theirs, given, rates(), function, arguments),
                    name=f"rank {rank}", daemon=True,
                )  # fmt: skip
                started.append(Rank(process, ours))
                process.start()
                theirs.close()
            yield started
        finally:
            for rank_ in started:
                if rank_.process.pid is not None:
                    rank_.process.kill()
                    rank_.process.join()
                    rank_.process.close()
                rank_.words.close()


def answers(count: int, function: Callable[..., Any], *arguments: Any, **variables: str) -> Any:
    """What each rank returns."""
    with ranks(count, function, *arguments, **variables) as started:
        return [rank.hear() for rank in started]


def _live(
    words: Connection, given: dict[str, str], known: tuple[tuple[float, float], float],
    function: Callable[..., Any], arguments: Sequence[Any],
) -> None:  # fmt: skip
    system.die_with(os.getppid())
    take_rates(known)
    os.environ.update(given)
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    try:
        words.send(("told", function(lambda what: words.send(("told", what)), *arguments)))
    # Whatever it raises is told by the test.
    except BaseException:
        words.send(("failed", traceback.format_exc()))
        # The end of the interpreter would wait for threads that wait for other ranks.
        os._exit(1)
    # Others may not have done what it has done; who started all of them ends all of them.
    while True:
        signal.pause()
