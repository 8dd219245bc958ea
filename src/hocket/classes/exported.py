"""Export a part to ONNX, a file that needs no class definition."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hocket.base.errors import UsageError, one_line
from hocket.classes.session import INPUT, OUTPUT

_OPSET = 17


def as_onnx(net: nn.Module, example: torch.Tensor) -> bytes:
    """Export a net for a batch of one to ONNX; batch norms are folded into their layers."""
    buffer = io.BytesIO()
    try:
        with _quiet():
            torch.onnx.export(
                net.eval().cpu(),
                (example.cpu(),),
                buffer,  # type: ignore[arg-type]
                # This exporter folds batch norms; the newer one would need the package onnxscript.
                dynamo=False,
                opset_version=_OPSET,
                input_names=[INPUT],
                output_names=[OUTPUT],
            )
    except Exception as error:
        raise UsageError(
            f"the net cannot be written as ONNX: {one_line(error)}",
            hint="check that its forward uses operators that ONNX has",
        ) from error
    return buffer.getvalue()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporters' messages meant for their own developers."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
