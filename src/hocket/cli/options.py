"""Options and parameter types that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import click

from hocket.base.units import parse_bandwidth, parse_bytes, parse_seconds, whole_number
from hocket.cli.declare import argument, option

_OPTIMIZERS = (
    "adamw", "adam", "sgd", "sgd-momentum", "adadelta", "adafactor", "adagrad", "adamax", "asgd",
    "muon", "nadam", "radam", "rmsprop", "rprop", "none",
)  # fmt: skip
"""Duplicate of the list in capture, whose import would load PyTorch; a test compares the two."""
_COUNT = click.IntRange(1, 2**20)


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """Parameter type that calls a function to parse a text such as ``8GiB``.

    The function raises `ValueError` for a wrong text.
    """

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a text; return other values, such as defaults, unchanged."""
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


class FiniteRange(click.FloatRange):
    """Number within bounds that is finite. Click's own range accepts ``nan`` and ``inf``."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse a finite number; report anything else as a usage error."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


def _parse_address(text: str) -> tuple[str, int]:
    """Parse host and port of ``10.0.0.1:7443``; an IPv6 host may be in brackets."""
    host, _, digits = text.rpartition(":")
    port = whole_number(digits, 2**16 - 1)
    if not host or port is None:
        raise ValueError(f"{text[:200]!r} is no HOST:PORT, such as 10.0.0.1:29500")
    return host.strip("[]"), port


def _parse_money(text: str) -> float:
    from hocket.planners.parallel.constraints import parse_dollars

    try:
        return parse_dollars(text)
    except ValueError:
        raise ValueError(f"{text!r} is no sum of money, such as $5/h") from None


def _parse_network(text: str) -> float:
    bandwidth_bps = parse_bandwidth(text)
    if bandwidth_bps <= 0.0:
        raise ValueError(f"{text!r} is no bandwidth of a network")
    return bandwidth_bps


SIZE = Parsed("size", parse_bytes)
DURATION = Parsed("time", parse_seconds)
BANDWIDTH = Parsed("bandwidth", _parse_network)
MONEY = Parsed("money", _parse_money)
ADDRESS = Parsed("host:port", _parse_address)
PlanFile = Annotated[Path, argument("PLAN")]
GraphFile = Annotated[Path | None, option("The plan's graph, where its file was moved.", "--graph")]
Host = Annotated[str, "Address to listen on."]
Transfers = Literal["shared", "queued", "parallel"]
"""Model of contention: simultaneous transfers share links, queue, or do not slow each other."""
On = Annotated[
    str,
    option(
        "Devices: a TOML file, a preset, shorthand such as 4xv100-16g, 'auto' for this machine or "
        "'file' for those that a graph's file states.",
        metavar="CLUSTER",
    ),
]
Output = Annotated[
    Path | None,
    option(
        "Plan file to write; the report goes beside it. [default: plan.json, of hocket fit "
        "fit.json, nothing with --json]",
        "-o",
        "--output",
    ),
]


@dataclass(frozen=True)
class ModelOptions:
    """Options for building a model and capturing its step; None means the model's default."""

    batch: Annotated[
        int | None, option("Samples in one step. [default: the model's]", type=_COUNT)
    ] = None
    seq: Annotated[
        int | None,
        option("Sequence length, for models that have one. [default: the model's]", type=_COUNT),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        "Type of the parameters. [default: the model's]",
    ] = None
    optimizer: Annotated[
        str | None,
        option(
            "The step's optimizer: adamw, adam, sgd, sgd-momentum or another class of torch.optim "
            "in lower case; 'none' captures inference. [default: adamw]",
            type=click.Choice(_OPTIMIZERS),
            metavar="NAME",
        ),
    ] = None
    loss: Annotated[
        str | None,
        option(
            "Loss to minimise: cross-entropy, mse or mean of the model's output (for a batch (x, "
            "y): against y), or package.module:function of it. [default: the loss that the model "
            "returns]",
            metavar="NAME_OR_FUNCTION",
        ),
    ] = None
    layers: int | None = None
    amp: Annotated[
        str | None,
        option(
            "Mixed precision by autocast. [default: bf16 for float32 models of 1 B parameters and "
            "more on accelerators, else none]",
            type=click.Choice(["bf16", "fp16", "none"]),
        ),
    ] = None

    def having(self, name: str, value: int) -> ModelOptions:
        """Copy of the options with another batch, sequence length or number of layers."""
        changed: dict[str, Any] = {name: value}
        return replace(self, **changed)

    @property
    def optimizer_name(self) -> str | None:
        """Name of the optimizer for `hocket.capture`; None for inference."""
        return None if self.optimizer == "none" else self.optimizer or "adamw"

    @property
    def amp_name(self) -> str | None:
        """Autocast type; None if there is no autocast."""
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


@dataclass(frozen=True, kw_only=True)
class ModelOn:
    """Options that define a problem: model, devices, memory budget and measured costs."""

    source: Annotated[str, argument("MODEL_OR_GRAPH")]
    on: On
    memory_bytes: Annotated[
        int | None,
        option(
            "Memory budget of every device, such as 8GiB. [default: what it has beside its "
            "headroom]",
            "--memory",
            type=SIZE,
        ),
    ] = None
    profile: Annotated[Path | None, "Measured op times from hocket profile."] = None
    calibration: Annotated[Path | None, "Fitted efficiencies from hocket calibrate."] = None
    options: ModelOptions
