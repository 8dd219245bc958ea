"""Options that several commands share, as decorators, and the values that they collect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(path_type=Path)
"""Type of an option that names a file."""


@dataclass(frozen=True)
class ModelOptions:
    """Options of a model that is captured; None leaves them to the model."""

    batch: int | None = None
    seq: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    loss: str | None = None
    layers: int | None = None
    amp: str | None = None

    def having(self, name: str, value: int) -> ModelOptions:
        """Copy the options with another batch, sequence length or number of layers."""
        changed: dict[str, Any] = {name: value}
        return replace(self, **changed)

    @property
    def optimizer_name(self) -> str | None:
        """The optimizer as `hocket.capture` takes it: None for inference."""
        return None if self.optimizer == "none" else self.optimizer or "adamw"

    @property
    def amp_name(self) -> str | None:
        """The requested autocast type; None for none."""
        return None if self.amp == "none" else self.amp

    def refuse_for_file(self, text: str) -> None:
        """Refuse options that would change the model, because a graph file is fixed."""
        from hocket.base.errors import UsageError

        for name, value in vars(self).items():
            if value is not None:
                raise UsageError(
                    f"--{name} has no effect on the graph file {text!r}",
                    hint=f"leave it out, or capture the model again with --{name} {value}",
                )


_OPTIMIZERS = (
    "adamw", "adam", "sgd", "sgd-momentum", "adadelta", "adafactor", "adagrad", "adamax", "asgd",
    "muon", "nadam", "radam", "rmsprop", "rprop", "none",
)  # fmt: skip
"""A list of its own, because the one of capture imports PyTorch; a test compares them."""


_MODEL_OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("--optimizer", click.Choice(_OPTIMIZERS), "The step's optimizer: adamw, adam, sgd, "
     "sgd-momentum or another class of torch.optim in lower case; 'none' captures inference. "
     "[default: adamw]"),
    ("--loss", None, "Loss to minimise: cross-entropy, mse or mean of the model's output (for a "
     "batch (x, y): against y), or package.module:function of it. [default: the loss that the "
     "model returns]"),
    ("--dtype", click.Choice(["float32", "bfloat16", "float16"]),
     "Type of the parameters. [default: the model's]"),
    ("--amp", click.Choice(["bf16", "fp16", "none"]), "Mixed precision by autocast. [default: "
     "bf16 for float32 models of 1 B parameters and more on accelerators, else none]"),
    ("--seq", click.IntRange(1, 2**20),
     "Sequence length, for models that have one. [default: the model's]"),
    ("--batch", click.IntRange(1, 2**20), "Samples in one step. [default: the model's]"),
)  # fmt: skip


def model_options(command: F) -> F:
    """Options for building the model and capturing its step, collected as ``options``."""
    names = [option.removeprefix("--") for option, _, _ in _MODEL_OPTIONS]

    @wraps(command)
    def collected(*args: Any, **given: Any) -> Any:
        options = ModelOptions(**{name: given.pop(name) for name in names})
        return command(*args, options=options, **given)

    found = cast(F, collected)
    for option, kind, help_text in _MODEL_OPTIONS:
        is_name = option in ("--optimizer", "--loss")
        metavar: dict[str, Any] = (
            {"metavar": "NAME" if kind else "NAME_OR_FUNCTION"} if is_name else {}
        )
        found = click.option(option, type=kind, help=help_text, **metavar)(found)
    return found


def cost_options(command: F) -> F:
    """The options that name files with measured costs: ``profile`` and ``calibration``."""
    named = (
        ("--calibration", "Fitted efficiencies from hocket calibrate."),
        ("--profile", "Measured op times from hocket profile."),
    )
    for name, help_text in named:
        command = click.option(name, type=click.Path(path_type=Path), help=help_text)(command)
    return command


def size_option_value(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """Parse the value of an option that takes a size, such as ``8GiB``."""
    from hocket.base.units import parse_bytes

    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def budget_options(
    *, metavar: str, devices: str, memory: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options ``on``, whose help begins with which ``devices`` are meant, and
    ``memory_bytes``."""

    def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option(
            "--memory", "memory_bytes", default=None, callback=size_option_value,
            metavar="SIZE", help=memory,
        )(command)  # fmt: skip
        return click.option(
            "--on", required=True, metavar=metavar,
            help=f"{devices}: shorthand such as 1xh200, a preset or a TOML file.",
        )(command)  # fmt: skip

    return with_options


def plan_arguments(command: F) -> F:
    """The argument and option of commands that read a plan."""
    graph = click.option(
        "--graph", "graph_file", type=click.Path(path_type=Path), default=None,
        help="The plan's graph, where its file was moved.",
    )  # fmt: skip
    plan = click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
    return plan(graph(command))
