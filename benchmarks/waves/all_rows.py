"""All workloads of the benchmarks of waves in one run, with one table at the end.

    PYTHONPATH=src:benchmarks/waves python benchmarks/waves/all_rows.py --seconds 290 --out FOLDER
    … --toy     # on a processor, small, one process at a time

Each workload has a process for recorded and one for compiled steps (``--kind`` has one of them: with
fewer beside each other, rows that wait for the host are disturbed less). First all prepare side by side:
they capture, compile, and compare losses over 100 steps; nothing is timed. When all are ready, or
after ``--prepare`` seconds, they take turns on a GPU that is otherwise idle (`timing.Turns`); who is
late is named, and computes losses between turns; what it compiles or captures then disturbs. Who
hangs ends itself (`timing.at_most`), and others go on. Lines are printed and saved as they come
(``waves.log``, ``rows.jsonl``); the table (``waves.md``) is written at the end of whatever there is.
"""  # noqa: E501

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from table import table_of
from timing import GO, READY

HERE = Path(__file__).parent
ASKED = "ResNet-56, CIFAR, 256;BERT;GPT-2 small 4 x 512;LSTM"
SMALL = "ResNet-56, CIFAR, 32;Mixer"
SMALL_SYSTEMS = "two lanes;whole batch;one lane;eager;compiled=True;reduce-overhead"
"""Of the small ones: what predictions and the whole step as one graph are judged by."""
_END_S = 10
"""Before the end nothing begins, and the table is written."""


class Task(NamedTuple):
    """A process of its own."""

    script: str
    workload: str
    more: tuple[str, ...] = ()

    def command(self, folder: str, until: float, options: argparse.Namespace) -> list[str]:
        """What is started."""
        return [
            sys.executable, str(HERE / self.script), "--turns", folder, "--until", str(until),
            "--only", self.workload, *self.more, *options.extra.split(),
            *(["--toy"] if options.toy else []),
        ]  # fmt: skip


def tasks_of(options: argparse.Namespace) -> list[Task]:
    """Pairs of kernels, and two processes for each workload, or one of them."""
    named = [("Mixer, toy", "BERT, toy;LSTM, toy")] if options.toy else []
    small, asked = named[0] if named else (options.small, options.asked)
    losses = f"--losses={options.losses}"
    found = [Task("pairs.py", "")]
    for name in filter(None, asked.split(";")):
        found += [Task("h200.py", name, (losses,)), Task("compiled_lanes.py", name)]
    for name in filter(None, small.split(";")):
        found += [Task("h200.py", name, ("--losses=0", f"--systems={SMALL_SYSTEMS}")),
                  Task("compiled_lanes.py", name, (f"--systems={SMALL_SYSTEMS}",))]  # fmt: skip
    asked_for = {"recorded": ("h200.py",), "compiled": ("compiled_lanes.py",)}.get(options.kind)
    return [task for task in found if asked_for is None or task.script in asked_for]


class Started:
    """Processes of all tasks; what they print is handed on."""

    def __init__(
        self, tasks: list[Task], folder: str, until: float, options: argparse.Namespace
    ) -> None:
        self._began, self._folder = time.time(), Path(folder)
        self._log = (options.out / "waves.log").open("a")
        self._printing = threading.Lock()
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "3", "OMP_NUM_THREADS": "2"}
        self.children: dict[subprocess.Popen[str], Task] = {}
        self._threads = []
        for task in tasks:
            child = subprocess.Popen(
                task.command(folder, until, options), stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, env=environment,
            )  # fmt: skip
            self.children[child] = task
            thread = threading.Thread(target=self._hand_on, args=(task, child), daemon=True)
            thread.start()
            self._threads.append(thread)
            if options.toy:
                # A processor has no turns to wait for, and no room for many.
                (self._folder / GO).touch()
                child.wait()

    def tell(self, text: str) -> None:
        """A line with the seconds since the beginning."""
        with self._printing:
            line = f"{time.time() - self._began:5.0f} {text.rstrip()}\n"
            print(line, end="", flush=True)
            self._log.write(line)
            self._log.flush()

    def let_go(self, after_s: float) -> None:
        """Wait until all are ready; then one after the other is timed."""
        until = time.time() + after_s
        while late := self._late():
            if time.time() > until:
                self.tell(f"still preparing, and beside the first rows: {'; '.join(late)}")
                break
            time.sleep(0.1)
        (self._folder / GO).touch()
        self.tell("all take turns from here on")

    def _late(self) -> list[str]:
        return [
            f"{task.script} {task.workload}"
            for child, task in self.children.items()
            if child.poll() is None and not (self._folder / f"{READY}-{child.pid}").exists()
        ]

    def _hand_on(self, task: Task, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            self.tell(f"{task.script[:5]} {line}")

    def end(self, until: float) -> None:
        """Wait for all, as long as there is time."""
        for child in self.children:
            try:
                child.wait(max(0.1, until - time.time()))
            except subprocess.TimeoutExpired:
                self.tell(f"out of time: {self.children[child]}")
                child.kill()
                continue
            if child.returncode:
                self.tell(f"ended with {child.returncode}: {self.children[child]}")
        for thread in self._threads:
            thread.join(2)
        self._log.close()


def run(tasks: list[Task], options: argparse.Namespace, prepare_s: float) -> Path | None:
    """The rows that all tasks write within the seconds that there are; None without any."""
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.time() + options.seconds - _END_S
    with tempfile.TemporaryDirectory() as folder:
        started = Started(tasks, folder, until, options)
        started.let_go(prepare_s)
        started.end(until + _END_S / 2)
        rows = Path(folder) / "rows.jsonl"
        return Path(shutil.copy(rows, options.out / "rows.jsonl")) if rows.exists() else None


def main() -> int:
    """Start all, hand on what they print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=290)
    parser.add_argument("--prepare", type=float, default=130, help="seconds until turns begin")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--asked", default=ASKED, help="workloads with all rows, by ;")
    parser.add_argument("--small", default=SMALL, help="those with few, and without losses")
    parser.add_argument("--losses", type=int, default=100, help="steps whose losses are compared")
    parser.add_argument(
        "--kind", choices=("recorded", "compiled"), help="of steps; else both, and pairs of kernels"
    )
    parser.add_argument("--extra", default="", help="options of all")
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    prepare_s = min(options.prepare, 0.6 * options.seconds)
    rows = run(tasks_of(options), options, prepare_s)
    if rows is not None:
        told = table_of(rows)
        (options.out / "waves.md").write_text(told)
        print(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
