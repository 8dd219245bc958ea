"""GNMT-like training step: layers of recurrent cells unrolled over time, with a backward pass.

Cell (l, t) reads the output of the layer below at time t and of its own layer at t - 1; a
projection ends every time step. The cells of a layer share one weight, whose gradient their
backward ops accumulate in place, last time step first. O(layers · steps), arrays over that grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hocket.graph.generators.batch import BatchBuilder, Numbers
from hocket.graph.generators.plain import chance
from hocket.graph.graph import Graph, Phase, Role

MIN_OPS = 6
_VOCABULARY = 32_000
_FLOAT_BYTES = 4


class _Net(NamedTuple):
    """Sizes of the network. Ops are numbered [row, step]; the last row is the projection."""

    num_layers: int
    num_steps: int
    hidden: int
    batch: int

    @property
    def num_rows(self) -> int:
        return self.num_layers + 1

    @property
    def state_bytes(self) -> int:
        return self.batch * self.hidden * _FLOAT_BYTES

    @property
    def modules(self) -> list[str]:
        return [f"layers.{layer}" for layer in range(self.num_layers)] + ["projection"]

    def names(self, suffix: str, modules: Sequence[str] = (), first_step: int = 0) -> list[str]:
        steps = range(first_step, self.num_steps)
        return [
            f"{module}.step{step}{suffix}" for module in modules or self.modules for step in steps
        ]

    def per_row(self, cell: Any, projection: Any) -> Any:
        return np.array([cell] * self.num_layers + [projection])

    def per_op(self, per_row: Any) -> Any:
        return np.repeat(per_row, self.num_steps)


def gnmt(num_ops: int, seed: int) -> Graph:
    """A training step with about (num_ops / 2)^(1/3) layers; off by at most one op per layer."""
    source = chance(seed)
    num_layers = max(1, round((num_ops / 2) ** (1 / 3)))
    num_steps = max(1, round((num_ops / (num_layers + 1) - 1) / 2))
    hidden, batch = 512 << source.randint(0, 2), 32 << source.randint(0, 3)
    net = _Net(num_layers, num_steps, hidden, batch)
    builder = BatchBuilder(f"gnmt-{num_ops}")
    weights = builder.tensors(
        [f"{module}.weight" for module in net.modules], _weight_bytes(net), role=Role.PARAMETER
    )
    forward, outputs = _forward(builder, net, weights)
    backward = _backward(builder, net, weights, forward, outputs)
    _optimizer(builder, net, weights, _weight_gradients(builder, net, backward))
    return builder.build(
        {
            "family": "gnmt",
            "num_ops": num_ops,
            "seed": seed,
            "layers": num_layers,
            "steps": num_steps,
            "hidden": hidden,
            "batch": batch,
        }
    )


def _weight_bytes(net: _Net) -> Any:
    cell = 2 * net.hidden * 4 * net.hidden * _FLOAT_BYTES
    return net.per_row(cell, net.hidden * _VOCABULARY * _FLOAT_BYTES)


def _flops(net: _Net) -> Any:
    cell = 2.0 * net.batch * 2 * net.hidden * 4 * net.hidden
    return net.per_op(net.per_row(cell, 2.0 * net.batch * net.hidden * _VOCABULARY))


def _add_ops(builder: BatchBuilder, net: _Net, suffix: str, position: Any, **columns: Any) -> Any:
    """Add ops for the whole grid: cells, then projections."""
    modules = [module for module in net.modules for _ in range(net.num_steps)]
    names = net.names(suffix)
    first = net.num_layers * net.num_steps
    flops = columns.pop("flops")
    partner = columns.pop("partner", np.full(len(names), -1))
    numbers = [
        builder.ops(
            names[part],
            kind + suffix,
            position=position[part],
            flops=flops[part],
            partner=partner[part],
            modules=modules[part],
            **columns,
        )
        for kind, part in (("lstm_cell", slice(0, first)), ("matmul", slice(first, None)))
    ]
    return np.concatenate(numbers).reshape(net.num_rows, net.num_steps)


def _forward(builder: BatchBuilder, net: _Net, weights: Numbers) -> tuple[Numbers, Numbers]:
    """Add forward ops and their outputs; returns both as [row, step]."""
    row, step = np.divmod(np.arange(net.num_rows * net.num_steps), net.num_steps)
    forward = _add_ops(builder, net, "", step * net.num_rows + row, flops=_flops(net))
    # A cell keeps its four gates besides its state and output for its backward op.
    output_bytes = net.per_row(6 * net.state_bytes, net.batch * _VOCABULARY * _FLOAT_BYTES)
    outputs = builder.tensors(
        net.names(".out"), net.per_op(output_bytes), producer=forward.ravel()
    ).reshape(forward.shape)
    tokens = builder.tensors(
        [f"tokens.step{step}" for step in range(net.num_steps)], net.state_bytes, role=Role.INPUT
    )
    builder.reads(forward[0], tokens)
    _read_saved(builder, net, forward, weights, outputs)
    return forward, outputs


def _read_saved(
    builder: BatchBuilder, net: _Net, ops: Numbers, weights: Numbers, outputs: Numbers
) -> None:
    """Add inputs of forward or backward ops: weight, output of the layer below, previous state."""
    builder.reads(ops.ravel(), net.per_op(weights))
    builder.reads(ops[1:].ravel(), outputs[:-1].ravel())
    builder.reads(ops[:-1, 1:].ravel(), outputs[:-1, :-1].ravel())


def _backward(
    builder: BatchBuilder, net: _Net, weights: Numbers, forward: Numbers, outputs: Numbers
) -> Numbers:
    """Add backward ops with gradients down the layers and back in time; returns [row, step]."""
    row, step = np.divmod(np.arange(forward.size), net.num_steps)
    mirrored = (net.num_steps - 1 - step) * net.num_rows + (net.num_layers - row)
    backward: Numbers = _add_ops(
        builder,
        net,
        ".backward",
        forward.size + mirrored,
        flops=2 * _flops(net),
        partner=forward.ravel(),
        phase=Phase.BACKWARD,
    )
    _read_saved(builder, net, backward, weights, outputs)
    builder.reads(backward.ravel(), outputs.ravel())
    down = builder.tensors(
        net.names(".gradient_down", net.modules[1:]),
        net.state_bytes,
        producer=backward[1:].ravel(),
    )
    builder.reads(backward[:-1].ravel(), down)
    back = builder.tensors(
        net.names(".gradient_back", net.modules[:-1], first_step=1),
        2 * net.state_bytes,
        producer=backward[:-1, 1:].ravel(),
    )
    builder.reads(backward[:-1, :-1].ravel(), back)
    return backward


def _weight_gradients(builder: BatchBuilder, net: _Net, backward: Numbers) -> Numbers:
    """Add weight gradients, summed in place from the last time step on; returns the final ones."""
    number = builder.num_tensors + np.arange(backward.size).reshape(backward.shape)
    left = np.full(backward.shape, -1)
    left[:, :-1] = number[:, 1:]
    builder.tensors(
        net.names(".weight_gradient"),
        net.per_op(_weight_bytes(net)),
        producer=backward.ravel(),
        role=Role.GRADIENT,
        alias_of=left.ravel(),
    )
    builder.reads(backward[:, :-1].ravel(), number[:, 1:].ravel())
    return number[:, 0].astype(np.int32)


def _optimizer(builder: BatchBuilder, net: _Net, weights: Numbers, gradients: Numbers) -> None:
    update = builder.ops(
        [f"{module}.update" for module in net.modules],
        "adamw",
        phase=Phase.OPTIMIZER,
        position=2 * net.num_rows * net.num_steps + np.arange(net.num_rows),
        flops=12.0 * _weight_bytes(net) / _FLOAT_BYTES,
        modules=net.modules,
    )
    states = builder.tensors(
        [f"{module}.adamw_state" for module in net.modules],
        2 * _weight_bytes(net),
        role=Role.OPTIMIZER_STATE,
    )
    for tensors in (weights, gradients, states):
        builder.reads(update, tensors)
    builder.tensors(
        [f"{module}.weight_updated" for module in net.modules],
        _weight_bytes(net),
        producer=update,
        role=Role.PARAMETER,
        alias_of=weights,
    )
