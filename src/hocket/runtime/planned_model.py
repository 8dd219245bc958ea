"""Build the model of a plan anew, capture its step, and compare the graph with the plan.

`build` finds the model by the name or factory in the graph, or uses a model of this program.
`require_same` refuses a model whose graph differs from the planned one, and names the first
difference.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from hocket.base.errors import UsageError
from hocket.capture import capture_program, load_model
from hocket.capture.given import loss_and_forward
from hocket.capture.loss import MEAN, OWN, Loss
from hocket.capture.optimizer import optimizer_of_meta
from hocket.capture.real import BuiltForReal, made_real
from hocket.graph.graph import Graph

_NOT_COMPARED = frozenset(
    {"name", "workspace_bytes", "tensor_bytes", "stated", "other_batch", "meta"}
)
"""Fields of a graph that a profile changes, or that do not affect the computation."""
_KINDS: Mapping[str, type] = {
    "batch": int, "seq": int, "dtype": str, "optimizer": str, "device": str, "amp": str,
}  # fmt: skip
"""Expected types of the capture's entries in ``graph.meta``, which may come from a user's file."""


@dataclass(frozen=True, eq=False)
class ModelSource:
    """A model that exists in this program, with the inputs of its capture."""

    model: torch.nn.Module
    batch: Any
    loss: Loss | str | None = None


@dataclass(frozen=True, eq=False)
class BuiltModel:
    """A model that can be trained, with the name and options to build it in other processes."""

    module: torch.nn.Module
    batch: Any
    loss: Loss | str | None
    name: str
    """Empty if no other process can build the model."""
    options: Mapping[str, Any]


def build(
    graph: Graph, *, model: str | None = None, source: ModelSource | None = None, seed: int = 0
) -> BuiltModel:
    """Build the model and batch that ``graph`` was captured from, with weights from ``seed``.

    ``model`` is a name or factory to use instead of the name in the graph. ``source`` is the model
    itself, which is not changed.
    """
    if model is None and source is not None:
        module, batch = made_real(source.model, source.batch, seed)
        _require_planned(graph, module, batch, graph.name, source.loss)
        return BuiltModel(copy.deepcopy(module), batch, source.loss, "", {})
    name, loss = _name_of(graph, model), _noted_loss(graph)
    keys = ("batch", "seq", "dtype")
    sizes = {key: graph.meta[key] for key in keys if graph.meta.get(key) is not None}
    # These sizes were read from the batch. A user's function may have parameters of the same names
    # with another meaning, so a second attempt is made without sizes.
    attempts = [sizes, {}] if ":" in name else [sizes]
    for options in attempts:
        try:
            module, batch = built_by_name(name, options, seed, is_named=model is not None)
            _require_planned(graph, module, batch, name, loss)
        except UsageError:
            if options is attempts[-1]:
                raise
            continue
        return BuiltModel(module, batch, loss, name, options)
    raise AssertionError("the last attempt returns or raises")


def built_by_name(
    name: str, options: Mapping[str, Any], seed: int, *, is_named: bool = True
) -> tuple[Any, Any]:
    """Build a model and its batch with weights and data drawn from ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, batch = _load(name, dict(options), is_named=is_named)
    module, batch = made_real(module, batch, seed)
    return module, batch


def _name_of(graph: Graph, model: str | None) -> str:
    """Return the name of the model: ``model``, or the name in the graph."""
    name = model or str(graph.meta.get("model") or "")
    if graph.meta.get("level") == "module" and (why := graph.meta.get("why")):
        mend = graph.meta.get("mend") or "keep the step independent of data values"
        raise UsageError(
            f"graph {graph.name!r} was not captured op by op, so it cannot be run: {why}",
            hint=f"{mend}; a training script can train it as it is, by hocket.prepare(memory=)",
        )
    if not graph.is_recorded or not name:
        raise UsageError(
            f"graph {graph.name!r} was not captured op by op from a model, so it cannot be run",
            hint="plan a model of the zoo or package.module:function",
        )
    _check_types(graph)
    return name


def _check_types(graph: Graph) -> None:
    for key, kind in _KINDS.items():
        value = graph.meta.get(key)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise UsageError(
                f"graph {graph.name!r} says that its {key} was {value!r}", hint="plan again"
            )


def _require_planned(
    graph: Graph, model: Any, batch: Any, name: str, loss: Loss | str | None
) -> None:
    """Capture the model's step, and refuse a graph that differs from the planned one."""
    meta, device = graph.meta, str(graph.meta.get("device"))
    loss, forward = loss_and_forward(model, batch, loss, meta.get("amp"), device)
    captured, _ = capture_program(
        model, batch, loss=loss, optimizer=optimizer_of_meta(meta), name=name,
        device=device, forward=forward,
    )  # fmt: skip
    require_same(graph, captured, name)


def _noted_loss(graph: Graph) -> str | None:
    """Return the name of the loss that the graph was captured with."""
    noted = graph.meta.get("loss")
    if noted is None or noted in (OWN, MEAN):
        return None
    if not isinstance(noted, str) or noted.startswith("function "):
        raise UsageError(
            f"the plan's loss is a function of the program that made it ({noted})",
            hint="run it from that program (hocket.auto(…).run()), or plan with --loss "
            "package.module:function",
        )
    return noted


def _load(name: str, options: dict[str, Any], *, is_named: bool) -> tuple[Any, Any]:
    while True:
        try:
            with BuiltForReal():
                return load_model(name, **options, device="cpu")
        except UsageError as error:
            # Leave out options that the user's function does not take.
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
    """Refuse a model whose graph differs from the planned one."""
    for spec in fields(Graph):
        if spec.name in _NOT_COMPARED:
            continue
        before, now = getattr(planned, spec.name), getattr(captured, spec.name)
        is_same = np.array_equal(before, now) if isinstance(before, np.ndarray) else before == now
        if is_same:
            continue
        before, now = planned.meta.get("torch"), torch.__version__
        versions = f"; the plan was captured with PyTorch {before}, here is {now}"
        raise UsageError(
            f"model {name!r} gives another graph than the plan's: {_difference(planned, captured)}",
            hint=f"plan again with this model, optimizer and batch{versions * (before != now)}",
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
            before_text, now_text = (text or "none" for text in texts)
            return f"op {now!r} has signature {now_text} instead of {before_text}"
    return "the same ops are connected or grouped differently"
