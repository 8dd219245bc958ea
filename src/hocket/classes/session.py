"""Run a part's ONNX file in ONNX Runtime on one thread, and measure its time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import InputFileError

INPUT, OUTPUT = "input", "scores"


def open_session(model: bytes | str | Path) -> Any:
    """Open a session on one thread; raises `InputFileError` if the file is no valid model."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    # Its warnings concern the graph, which the user cannot change here.
    options.log_severity_level = 3
    # Even a pool of one thread would spin on the core to which the worker is pinned. The 10 %
    # quantile of the runs, because disturbances only make a run longer.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    content = model if isinstance(model, bytes) else str(model)
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        where = "" if isinstance(model, bytes) else str(model)
        raise InputFileError(
            f"is no ONNX model that can be run: {error}", hint="make the part again", where=where
        ) from error


def vector_width() -> int:
    """Channels that ONNX Runtime computes at once; narrower layers are padded to this number."""
    try:
        return 16 if b" avx512f " in Path("/proc/cpuinfo").read_bytes() else 8
    except OSError:
        return 8


def infer(session: Any, inputs: np.ndarray[Any, Any]) -> FloatArray:
    """The outputs for a batch."""
    outputs: FloatArray = session.run([OUTPUT], {INPUT: inputs})[0]
    return outputs


def latency_s(session: Any, example: np.ndarray[Any, Any], runs: int = 80) -> float:
    """CPU time of one input on one thread, which excludes time of other processes.

    The 10 % quantile of the runs, because disturbances only make a run longer.
    """
    for _ in range(5):
        infer(session, example)
    spent = []
    for _ in range(runs):
        start = time.process_time_ns()
        infer(session, example)
        spent.append(time.process_time_ns() - start)
    return float(np.quantile(spent, 0.1)) * 1e-9
