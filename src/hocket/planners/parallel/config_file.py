"""Read one parallel config from a TOML file, to be predicted exactly as it is written.

The file names the model (``model = "gpt3-175b"`` or a ``[model]`` table), the cluster (``on``), the
batch and the degrees (``[parallel]``). Degrees that are left out are 1 and options are off, except
the data degree, which fills the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hocket.base import fields
from hocket.base.errors import InputFileError, UsageError
from hocket.base.jsonfile import read_bounded
from hocket.base.regular import is_file
from hocket.base.toml import parse_toml
from hocket.cost.parallel.options import with_options
from hocket.cost.parallel.softwares import DEFAULT_SOFTWARE, find_software
from hocket.transformer import ParallelConfig, Transformer
from hocket.transformer.config_data import config_from_data
from hocket.transformer.files import find_model, model_from_dict
from hocket.transformer.rules import broken_rules

MAX_FILE_BYTES = 1_000_000
MIXED_DTYPES = ("float16", "bfloat16", "float8")


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Content of a configuration file; its paths are relative to its folder."""

    model: Transformer
    on: str
    batch: int
    dtype: str | None
    software: str | None
    options: tuple[str, ...]
    """Settings of the training program, in the syntax of `hocket.cost.parallel.options`."""
    coefficients: Path | None
    config: ParallelConfig
    fills_cluster: bool
    """True if the file leaves out the data degree, so that replicas fill the cluster."""


def read_configuration(path: str | Path) -> Configuration:
    """Read a configuration file; raises `InputFileError` that names the key and a remedy."""
    path = Path(path)
    with fields.located(str(path)):
        data = read_bounded(path, MAX_FILE_BYTES, lambda head: True, "TOML")
        return _configuration(parse_toml(data), path.parent)


def filled(configuration: Configuration, groups: Sequence[int]) -> ParallelConfig:
    """The config of a file, with a data degree that fills the cluster if the file has none.

    ``groups`` counts the tensor-parallel groups per device type. All replicas of a stage are on one
    device type.
    """
    config = configuration.config
    if not configuration.fills_cluster:
        return config
    pipeline, context = config.pipeline, config.context
    possible = range(sum(groups) // (pipeline * context), 0, -1)
    held = (n for n in possible if sum(own // (n * context) for own in groups) >= pipeline)
    return replace(config, data=next(held, 1))


def check_configuration(model: Transformer, config: ParallelConfig, where: str) -> None:
    """Raise `InputFileError` if the config is impossible for the model."""
    broken = list(broken_rules(model, config))
    if broken:
        raise InputFileError("; ".join(broken[:3]), hint="change [parallel] or batch", where=where)


def _configuration(data: Mapping[str, Any], folder: Path) -> Configuration:
    top = fields.record(
        data, "the file", required=("model", "on", "batch", "parallel"),
        optional=("dtype", "software", "options", "coefficients"),
    )  # fmt: skip
    model = top["model"]
    batch = fields.integer(top["batch"], "batch", 1, 2**31 - 1)
    file = top.get("coefficients")
    return Configuration(
        model=model_from_dict(model)
        if isinstance(model, Mapping)
        else find_model(_beside(folder, fields.text(model, "model"))),
        on=_beside(folder, fields.text(top["on"], "on")),
        batch=batch,
        dtype=fields.choice(top["dtype"], "dtype", MIXED_DTYPES) if "dtype" in top else None,
        software=fields.text(top["software"], "software") if "software" in top else None,
        options=_options(top.get("options", [])),
        coefficients=None if file is None else folder / fields.text(file, "coefficients"),
        config=config_from_data(top["parallel"], "parallel", batch),
        fills_cluster="data" not in top["parallel"],
    )


def _options(value: object) -> tuple[str, ...]:
    """Validate options while the file is read, so that errors name the file."""
    texts = tuple(fields.text(entry, "options") for entry in fields.items(value, "options"))
    try:
        with_options(find_software(DEFAULT_SOFTWARE), texts)
    except UsageError as error:
        raise InputFileError(f"options: {error.message}", hint=error.hint) from None
    return texts


def _beside(folder: Path, text: str) -> str:
    """Path of a file in the configuration's folder if it exists there, else the text itself."""
    return str(folder / text) if is_file(folder / text) else text
