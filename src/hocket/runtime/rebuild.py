"""From a plan back to the model that it was made for: built, captured again and compared."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from hocket.capture import capture_program, load_model, named_tensors
from hocket.capture.program import Program
from hocket.errors import UsageError
from hocket.graph.graph import Graph

_NOT_COMPARED = frozenset({"name", "workspace_bytes", "tensor_bytes", "stated", "meta"})
"""Fields that a profile changes, or that do not say what is computed."""
_KINDS: Mapping[str, type] = {
    "batch": int, "seq": int, "dtype": str, "optimizer": str, "device": str,
}  # fmt: skip
"""What a graph says about its capture. Anyone may have written it."""


@dataclass(frozen=True, eq=False)
class Rebuilt:
    """A model as it can be run."""

    program: Program
    values: Mapping[str, torch.Tensor]
    """Parameters, buffers and batch, under the names of the program."""


def rebuild(graph: Graph, *, model: str | None = None, seed: int = 0) -> Rebuilt:
    """The model and batch that ``graph`` was captured from, with weights drawn from ``seed``.

    ``model`` names it where the graph's own name does not lead to it any more.
    """
    meta = graph.meta
    name = model or str(meta.get("model") or "")
    if meta.get("level") != "op" or not name:
        raise UsageError(
            f"graph {graph.name!r} was not captured op by op from a model, so it cannot be run",
            hint="plan a model of the zoo or package.module:function",
        )
    _check_types(graph)
    read_off = {key: meta[key] for key in ("batch", "seq", "dtype") if meta.get(key) is not None}
    if ":" not in name:
        return _rebuilt(graph, name, read_off, seed, is_named=model is not None)
    try:
        return _rebuilt(graph, name, read_off, seed)
    except UsageError:
        # The sizes were read off the batch; to the user's function they may mean something else.
        with suppress(UsageError):
            return _rebuilt(graph, name, {}, seed)
        raise


def _check_types(graph: Graph) -> None:
    for key, kind in _KINDS.items():
        value = graph.meta.get(key)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise UsageError(
                f"graph {graph.name!r} says that its {key} was {value!r}", hint="plan again"
            )


def _rebuilt(
    graph: Graph, name: str, options: Mapping[str, Any], seed: int, *, is_named: bool = True
) -> Rebuilt:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built, batch = _load(name, dict(options), is_named=is_named)
    meta = graph.meta
    captured, program = capture_program(
        built, batch, optimizer=meta.get("optimizer"), name=name, device=str(meta.get("device"))
    )
    require_same(graph, captured, name)
    return Rebuilt(program, named_tensors(built, batch))


def _load(name: str, options: dict[str, Any], *, is_named: bool) -> tuple[Any, Any]:
    while True:
        try:
            return load_model(name, **options, device="cpu")
        except UsageError as error:
            # The user's function decides by itself what it was not asked for.
            refusals = {key: (f"has no parameter {key!r}", f"unknown {key} ") for key in options}
            refused = [key for key, texts in refusals.items()
                       if any(text in error.message for text in texts)]  # fmt: skip
            if ":" in name and refused:
                del options[refused[0]]
                continue
            if not is_named and "unknown model" in error.message:
                raise UsageError(
                    f"the plan's model {name!r} is not known here",
                    hint="name it with --model: a model of the zoo or package.module:function",
                ) from None
            raise


def require_same(planned: Graph, captured: Graph, name: str) -> None:
    """Refuse to run a model whose graph is not the planned one."""
    for spec in fields(Graph):
        if spec.name in _NOT_COMPARED:
            continue
        before, now = getattr(planned, spec.name), getattr(captured, spec.name)
        is_same = np.array_equal(before, now) if isinstance(before, np.ndarray) else before == now
        if is_same:
            continue
        versions = f"captured with PyTorch {planned.meta.get('torch')}, here is {torch.__version__}"
        raise UsageError(
            f"model {name!r} gives another graph than the plan's: {_difference(planned, captured)}",
            hint=f"plan again; the plan was {versions}",
        )


def _difference(planned: Graph, captured: Graph) -> str:
    if planned.num_ops != captured.num_ops:
        return f"{captured.num_ops} ops instead of {planned.num_ops}"
    for op, (before, now) in enumerate(zip(planned.op_names, captured.op_names, strict=True)):
        if before != now:
            return f"op {op} is {now!r} instead of {before!r}"
        texts = [
            graph.signatures[graph.op_signature[op]] if graph.op_signature[op] >= 0 else ""
            for graph in (planned, captured)
        ]
        if texts[0] != texts[1]:
            return f"op {now!r} is {texts[1]} instead of {texts[0]}"
    return "the same ops are connected or grouped differently"
