"""``hocket split``: split a classifier by class into small sub-models and write their folder."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from hocket.cli.declare import argument, declare, option
from hocket.cli.options import DURATION
from hocket.cli.output import console, emit, say

if TYPE_CHECKING:
    from hocket.classes.settings import SplitRequest

_LOG_S = 10.0
"""Seconds between two progress lines about the same activity."""


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """Options of the split as the user writes them."""

    target_latency: Annotated[
        float | None, option("Target latency of an answer, such as 2ms.", type=DURATION)
    ] = None
    work: Annotated[
        float, "Work of each sub-model as a fraction of the whole net; not with --target-latency."
    ] = 0.25
    criterion: Annotated[
        Literal["value", "hybrid"],
        "Channels to prune: the least valuable within --work or --target-latency, or those "
        "that sensAI's two thresholds name.",
    ] = "value"
    theta1: Annotated[
        float, "hybrid: prune channels whose share of zeros is about this or larger,"
    ] = 0.73
    theta2: Annotated[float, "and a mean activation below this."] = 0.01
    accuracy_loss: Annotated[float, "Percentage points of accuracy that may be lost."] = 0.2
    redundancy: Annotated[
        int, option("Copies of each class, on different workers.", type=click.IntRange(1, 10))
    ] = 1
    train_steps: Annotated[
        int,
        option(
            "Train the whole net first, for so many steps.",
            "--train",
            type=click.IntRange(0),
            metavar="STEPS",
        ),
    ] = 0
    steps: Annotated[
        int,
        option(
            "Retraining steps of each sub-model.",
            "--retrain",
            type=click.IntRange(1),
            metavar="STEPS",
        ),
    ] = 200
    batch: Annotated[int, option("Samples in one step of retraining.", type=click.IntRange(2))] = 64
    optimizer: Annotated[
        Literal["sgd", "adamw"], "Optimizer of all training; adamw suits transformers."
    ] = "sgd"
    learning_rate: Annotated[
        float | None, "Peak learning rate. [default: 0.05 for sgd, 0.001 for adamw]"
    ] = None
    limit: Annotated[
        float | None,
        option(
            "Time limit of each training, such as 10min; its learning rate decays within that.",
            type=DURATION,
        ),
    ] = None
    compiled: Annotated[
        bool, option("Train with torch.compile; worth it for trainings of minutes.", "--compile")
    ] = False
    soft_targets: Annotated[
        float,
        option(
            "Weight of the whole net's outputs (distillation) in retraining.",
            type=click.FloatRange(0, 1),
        ),
    ] = 0.7
    rounds: Annotated[
        int, option("Rounds in which pruned channels may be restored.", type=click.IntRange(0, 20))
    ] = 4
    device: Annotated[str, "Device to train on, such as cuda."] = "cpu"
    seed: Annotated[int, "Seed of random weights, of the data's split and of retraining."] = 0


@declare("split")
def command(
    *,
    net: Annotated[str, argument("FILE.py:FUNCTION")],
    data: Annotated[str, option("Labelled inputs.", metavar="FILE.py:FUNCTION")],
    parts: Annotated[str, "Number of sub-models, or auto."] = "auto",
    settings: _Settings,
    cores: Annotated[
        int | None,
        option(
            "Cores of the machine that will serve. [default: those of this machine]",
            type=click.IntRange(1),
        ),
    ] = None,
    output: Annotated[Path, option("Folder to write.", "-o", "--output")] = Path("parts"),
    as_json: bool,
) -> None:
    """Split a classifier by class into smaller sub-models, which together answer sooner.

    The same command resumes where it was interrupted. Exit code 6: more accuracy was lost than
    allowed; the folder is written and states the loss.
    """
    from hocket.base.errors import CheckError
    from hocket.base.extras import require

    for package in ("torch", "torch_pruning", "onnxruntime", "safetensors"):
        require(package, "hocket split")
    request = _request(net, data, parts, settings)
    from hocket.classes.report import split_text, write_split_report
    from hocket.classes.split import split

    with _progress() as tell:
        done = split(request, output, cores=cores, progress=tell)
    write_split_report(output, done.table, done.validation.to_data())
    if as_json:
        emit({"folder": output, "table": done.table.to_data(),
              "validation": done.validation.to_data()})  # fmt: skip
    else:
        click.echo(split_text(done.table, done.validation.to_data()))
        say(f"wrote {output}; next: hocket serve-classes {output}")
    if not done.validation.holds:
        lost, allowed = done.validation.accuracy_loss, done.validation.allowed_loss
        raise CheckError(
            f"{lost:.2f} points of accuracy were lost on validation data, {allowed:g} are allowed",
            hint="allow more --retrain steps, a longer --target-latency or more --rounds",
        )


def _request(net: str, data: str, parts: str, settings: _Settings) -> SplitRequest:
    from hocket.base.errors import UsageError
    from hocket.base.units import whole_number
    from hocket.classes.settings import (
        ANY_NUMBER,
        USUAL_RATES,
        HybridCriterion,
        NetTraining,
        SplitRequest,
    )

    if parts != "auto" and not whole_number(parts, 10_000):
        raise UsageError(
            f"--parts {parts[:60]!r} is no number of sub-models", hint="such as 5, or auto"
        )
    rate, decay = USUAL_RATES[settings.optimizer]
    retraining = NetTraining(
        steps=settings.steps,
        limit_s=settings.limit,
        batch=settings.batch,
        optimizer=settings.optimizer,
        learning_rate=rate if settings.learning_rate is None else settings.learning_rate,
        weight_decay=decay,
        soft_weight=settings.soft_targets,
        compiled=settings.compiled,
        seed=settings.seed,
    )
    return SplitRequest(
        net=_absolute(net),
        data=_absolute(data),
        parts=ANY_NUMBER if parts == "auto" else int(parts),
        redundancy=settings.redundancy,
        target_s=settings.target_latency,
        work=settings.work,
        hybrid=HybridCriterion(theta1=settings.theta1, theta2=settings.theta2)
        if settings.criterion == "hybrid"
        else None,
        accuracy_loss=settings.accuracy_loss,
        train_steps=settings.train_steps,
        retraining=retraining,
        rounds=settings.rounds,
        seed=settings.seed,
        device=settings.device,
    )


def _absolute(spec: str) -> str:
    """Make the path of a Python file absolute, because training processes may run in other
    folders."""
    file, separator, function = spec.rpartition(":")
    is_file = file.endswith(".py")
    return f"{Path(file).absolute()}{separator}{function}" if is_file else spec


def _lines() -> Callable[[str, int, int], None]:
    """Return a callback that logs progress at the beginning, about every ten seconds, and at the
    end.
    """
    last_s: dict[str, float] = {}

    def tell(what: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if what in last_s and done < total and now_s - last_s[what] < _LOG_S:
            return
        if last_s.get(what) == math.inf:
            return
        # Infinity marks a finished activity, so that its last line is printed once.
        last_s[what] = math.inf if done >= total else now_s
        say(f"{what}: {done} of {total}")

    return tell


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show progress bars on a terminal, or lines in a log; yield the callback."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.progress import Progress, TaskID

    with Progress(console=console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield tell
