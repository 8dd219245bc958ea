"""``hocket split``: one classifier as several small ones that answer together."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from hocket.cli.output import console, emit, json_option, say

_LOG_S = 10.0
"""Between two lines of a log about one thing."""


@click.command("split")
@click.argument("net", metavar="FILE.py:FUNCTION")
@click.option("--data", required=True, metavar="FILE.py:FUNCTION", help="Labelled inputs.")
@click.option("--parts", default="auto", show_default=True, help="Number of sub-models, or auto.")
@click.option("--target-latency", default=None, help="Of an answer, such as 2ms.")
@click.option("--work", type=float, default=0.25, show_default=True,
              help="Of the whole net, for each sub-model; not with --target-latency.")  # fmt: skip
@click.option("--criterion", type=click.Choice(("value", "hybrid")), default="value",
              show_default=True, help="Channels to prune: the least valuable within --work or "
              "--target-latency, or those that sensAI's two thresholds name.")  # fmt: skip
@click.option("--theta1", type=float, default=0.73, show_default=True,
              help="hybrid: prune channels with a larger share of zeros, nearly,")  # fmt: skip
@click.option("--theta2", type=float, default=0.01, show_default=True,
              help="and a mean activation below this.")  # fmt: skip
@click.option(
    "--accuracy-loss", type=float, default=0.2, show_default=True, help="Points that may be lost."
)
@click.option(
    "--redundancy", type=click.IntRange(1, 10), default=1, show_default=True,
    help="Copies of each class, on different workers.",
)  # fmt: skip
@click.option("--train", "train_steps", type=click.IntRange(0), default=0, metavar="STEPS",
              help="Train the net first.")  # fmt: skip
@click.option("--retrain", "steps", type=click.IntRange(1), default=200, show_default=True,
              metavar="STEPS", help="Steps of each sub-model.")  # fmt: skip
@click.option("--batch", type=click.IntRange(2), default=64, show_default=True,
              help="Samples in one step of retraining.")  # fmt: skip
@click.option("--optimizer", type=click.Choice(("sgd", "adamw")), default="sgd",
              show_default=True, help="For training; adamw suits transformers.")  # fmt: skip
@click.option("--learning-rate", type=float, default=None,
              help="The highest of training; default: 0.05 for sgd, 0.001 for adamw.")  # fmt: skip
@click.option("--limit", default=None,
              help="Of each training, such as 10min; its rate falls sooner then.")  # fmt: skip
@click.option("--compile", "compiled", is_flag=True,
              help="Train by torch.compile; worth it for trainings of minutes.")  # fmt: skip
@click.option("--soft-targets", type=click.FloatRange(0, 1), default=0.7, show_default=True,
              help="Weight of the whole net's opinion in retraining.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(0, 20), default=4, show_default=True,
              help="How often channels may be given back.")  # fmt: skip
@click.option("--cores", type=click.IntRange(1), default=None,
              help="Of the machine that will serve; default: this one.")  # fmt: skip
@click.option("--device", default="cpu", show_default=True, help="To train on, such as cuda.")
@click.option("--seed", type=int, default=0, show_default=True,
              help="Of random weights, of the data's config and of retraining.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("parts"),
              show_default=True, help="Folder to write.")  # fmt: skip
@json_option
def command(net: str, data: str, parts: str, as_json: bool, output: Path, **asked: Any) -> None:
    """Split a classifier by class into parts that are smaller, and answer sooner together.

    The same command goes on where it was interrupted. Exit code 6: more accuracy was lost than
    allowed; the folder is written and says by how much.
    """
    from hocket.base.errors import CheckError
    from hocket.base.extras import require

    for package in ("torch", "torch_pruning", "onnxruntime", "safetensors"):
        require(package, "hocket split")
    request = _request(net, data, parts, asked)
    from hocket.classes.report import split_text, write_split_report
    from hocket.classes.split import split

    with _progress() as tell:
        done = split(request, output, cores=asked["cores"], progress=tell)
    write_split_report(output, done.table, done.validation.to_data())
    if as_json:
        emit({"folder": str(output), "table": done.table.to_data(),
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


def _request(net: str, data: str, parts: str, asked: dict[str, Any]) -> Any:
    from hocket.base.errors import UsageError
    from hocket.base.units import parse_seconds, whole_number
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
    seconds: dict[str, float | None] = {}
    for name in ("target_latency", "limit"):
        try:
            seconds[name] = None if asked[name] is None else parse_seconds(asked[name])
        except ValueError as error:
            raise UsageError(str(error), where=f"--{name.replace('_', '-')}") from None
    rate, decay = USUAL_RATES[asked["optimizer"]]
    retraining = NetTraining(
        steps=asked["steps"],
        limit_s=seconds["limit"],
        batch=asked["batch"],
        optimizer=asked["optimizer"],
        learning_rate=rate if asked["learning_rate"] is None else asked["learning_rate"],
        weight_decay=decay,
        soft_weight=asked["soft_targets"],
        compiled=asked["compiled"],
        seed=asked["seed"],
    )
    return SplitRequest(
        net=_absolute(net),
        data=_absolute(data),
        parts=ANY_NUMBER if parts == "auto" else int(parts),
        redundancy=asked["redundancy"],
        target_s=seconds["target_latency"],
        work=asked["work"],
        hybrid=HybridCriterion(theta1=asked["theta1"], theta2=asked["theta2"])
        if asked["criterion"] == "hybrid"
        else None,
        accuracy_loss=asked["accuracy_loss"],
        train_steps=asked["train_steps"],
        retraining=retraining,
        rounds=asked["rounds"],
        seed=asked["seed"],
        device=asked["device"],
    )


def _absolute(spec: str) -> str:
    """A file by its whole path: processes that train parts may run elsewhere."""
    file, separator, function = spec.rpartition(":")
    is_file = file.endswith(".py")
    return f"{Path(file).absolute()}{separator}{function}" if is_file else spec


def _lines() -> Callable[[str, int, int], None]:
    """Tell a log what is done: when it begins, now and then, and when it ends."""
    last_s: dict[str, float] = {}

    def tell(what: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if what in last_s and done < total and now_s - last_s[what] < _LOG_S:
            return
        if last_s.get(what) == math.inf:
            return
        last_s[what] = math.inf if done >= total else now_s
        say(f"{what}: {done} of {total}")

    return tell


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Bars on stderr where somebody looks at them; lines, at most one in ten seconds, in a log."""
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
