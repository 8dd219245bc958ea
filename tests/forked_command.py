"""Commands of hocket in processes of their own that find PyTorch already imported.

For tests that end commands by signals or run them beside each other: what they ask does not hang
on how Python starts. Use it as `subprocess.Popen`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from forked import CONTEXT, Descriptor, rates, take_rates
from forked_worker_group import forked_worker_groups

from hocket.__main__ import main
from hocket.processes import system


class ForkedCommand:
    """``hocket arguments`` in a folder."""

    def __init__(
        self, *arguments: object, cwd: Path | str = ".", env: Mapping[str, str] | None = None,
        forks_ranks: bool = False,
    ) -> None:  # fmt: skip
        out, err = os.pipe(), os.pipe()
        given = ["hocket", *map(str, arguments)]
        self.process = CONTEXT.Process(
            target=_run, daemon=False,
            args=([Descriptor(out[1]), Descriptor(err[1])], given, str(Path(cwd).resolve()),
                  dict(os.environ if env is None else env), forks_ranks, rates()),
        )  # fmt: skip
        self.process.start()
        os.close(out[1])
        os.close(err[1])
        self.stdout: IO[str] = open(out[0], encoding="utf-8")  # noqa: SIM115
        self.stderr: IO[str] = open(err[0], encoding="utf-8")  # noqa: SIM115

    def __enter__(self) -> ForkedCommand:
        return self

    def __exit__(self, *_: object) -> None:
        """End it, if it has not ended by itself."""
        self.kill()
        self.process.join()
        self.stdout.close()
        self.stderr.close()

    @property
    def pid(self) -> int:
        """Its number."""
        assert self.process.pid is not None, "it was started"
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended; None before."""
        return self.process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """As the shell does."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """At once."""
        self.process.kill()

    def communicate(self) -> tuple[str, str]:
        """All that it still prints; waits for its end."""
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.append(self.stderr.read()))
        reader.start()
        out = self.stdout.read()
        reader.join()
        self.process.join()
        return out, errors[0]


def _run(
    outputs: list[int], given: list[str], folder: str, variables: Mapping[str, str],
    forks_ranks: bool, known: tuple[tuple[float, float], float],
) -> None:  # fmt: skip
    system.die_with(os.getppid())
    take_rates(known)
    for number, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, number)
        os.close(output)
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv = given
    with forked_worker_groups() if forks_ranks else contextlib.nullcontext():
        main()
