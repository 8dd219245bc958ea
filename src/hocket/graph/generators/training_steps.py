"""Synthetic training steps: a GNMT-like recurrent network and a transformer, AdamW at the end.

GNMT: cell (layer, time) reads the output of the layer below at the same time and of its own layer
one time step earlier; a projection ends every time step. The cells of a layer share one weight,
whose gradient their backward ops accumulate in place, last time step first.

Transformer: one table describes the layers of a block. A backward op reads the gradients of its
layer's output and the activations that the layer saved, and makes a gradient for each of its
inputs; matrix products have a second backward op for their weight.

O(ops), both op by op in the order of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hocket.graph.build import GraphBuilder
from hocket.graph.generators.forward_graphs import finished
from hocket.graph.graph import Graph, Phase, Role

_FLOAT_BYTES = 4


class _Weight(NamedTuple):
    """A parameter: prefix of its names, its module, its number of elements and its tensor."""

    prefix: str
    module: str
    elements: int
    tensor: int


def _add_weight(builder: GraphBuilder, prefix: str, module: str, elements: int) -> _Weight:
    size_bytes = elements * _FLOAT_BYTES
    tensor = builder.tensor(f"{prefix}.weight", size_bytes, role=Role.PARAMETER)
    return _Weight(prefix, module, elements, tensor)


def _add_gradient(builder: GraphBuilder, weight: _Weight, op: int, alias_of: int = -1) -> int:
    return builder.tensor(
        f"{weight.prefix}.weight_gradient", weight.elements * _FLOAT_BYTES,
        producer=op, role=Role.GRADIENT, alias_of=alias_of,
    )  # fmt: skip


def _add_state(builder: GraphBuilder, weight: _Weight) -> int:
    """Add the optimizer state of a weight."""
    size_bytes = 2 * weight.elements * _FLOAT_BYTES
    return builder.tensor(f"{weight.prefix}.adamw_state", size_bytes, role=Role.OPTIMIZER_STATE)


def _add_adamw(builder: GraphBuilder, weight: _Weight, gradient: int, state: int) -> None:
    """Add an op that updates a weight in place."""
    op = builder.op(
        f"{weight.prefix}.update", "adamw", reads=[weight.tensor, gradient, state],
        phase=Phase.OPTIMIZER, flops=12.0 * weight.elements, module=weight.module,
    )  # fmt: skip
    builder.tensor(
        f"{weight.prefix}.weight_updated", weight.elements * _FLOAT_BYTES,
        producer=op, role=Role.PARAMETER, alias_of=weight.tensor,
    )  # fmt: skip


# GNMT

GNMT_MIN_OPS = 6
_GNMT_VOCABULARY = 32_000


def gnmt(num_ops: int, seed: int) -> Graph:
    """A training step with about (num_ops / 2)^(1/3) layers; off by at most one op per layer."""
    source = np.random.RandomState(seed)
    # About two ops (forward, backward) per cell with as many steps as layers squared.
    num_layers = max(1, round((num_ops / 2) ** (1 / 3)))
    num_steps = max(1, round((num_ops / (num_layers + 1) - 1) / 2))
    hidden, batch = 512 << source.randint(0, 2), 32 << source.randint(0, 3)
    step = _GnmtStep(f"gnmt-{num_ops}", num_layers, num_steps, hidden, batch)
    step.add_forward()
    step.add_backward()
    for weight, gradient in zip(step.weights, step.weight_gradients, strict=True):
        _add_adamw(step.builder, weight, gradient, _add_state(step.builder, weight))
    return finished(
        step.builder, family="gnmt", num_ops=num_ops, seed=seed, layers=num_layers,
        steps=num_steps, hidden=hidden, batch=batch,
    )  # fmt: skip


class _GnmtStep:
    """Ops and tensors by row and time step; the last row is the projection."""

    def __init__(self, name: str, num_layers: int, num_steps: int, hidden: int, batch: int) -> None:
        self.builder = GraphBuilder(name)
        self.num_layers, self.num_steps, self.batch = num_layers, num_steps, batch
        self.kinds = ["lstm_cell"] * num_layers + ["matmul"]
        self.state_bytes = batch * hidden * _FLOAT_BYTES
        # A cell saves its four gates besides its state and output for its backward op.
        self.output_bytes = [6 * self.state_bytes] * num_layers
        self.output_bytes.append(batch * _GNMT_VOCABULARY * _FLOAT_BYTES)
        cell, words = 2 * hidden * 4 * hidden, hidden * _GNMT_VOCABULARY
        modules = [*(f"layers.{layer}" for layer in range(num_layers)), "projection"]
        self.weights = [
            _add_weight(self.builder, module, module, words if module == "projection" else cell)
            for module in modules
        ]
        self.weight_gradients = [-1] * len(modules)
        self.forward: dict[tuple[int, int], int] = {}
        self.outputs: dict[tuple[int, int], int] = {}

    def add_forward(self) -> None:
        """Add the forward ops and their outputs."""
        for time in range(self.num_steps):
            tokens = self.builder.tensor(f"tokens.step{time}", self.state_bytes, role=Role.INPUT)
            for row, weight in enumerate(self.weights):
                name = f"{weight.prefix}.step{time}"
                op = self.builder.op(
                    name, self.kinds[row],
                    reads=[*self._inputs(row, time), *([] if row else [tokens])],
                    flops=2.0 * self.batch * weight.elements, module=weight.module,
                )  # fmt: skip
                self.forward[row, time] = op
                self.outputs[row, time] = self.builder.tensor(
                    f"{name}.out", self.output_bytes[row], producer=op
                )

    def add_backward(self) -> None:
        """Add backward ops with gradients down the layers and back in time, last step first."""
        received: dict[tuple[int, int], list[int]] = defaultdict(list)
        for time in reversed(range(self.num_steps)):
            for row in reversed(range(len(self.weights))):
                weight, sum_so_far = self.weights[row], self.weight_gradients[row]
                name = f"{weight.prefix}.step{time}"
                reads = [*self._inputs(row, time), self.outputs[row, time], *received[row, time]]
                op = self.builder.op(
                    f"{name}.backward", f"{self.kinds[row]}.backward",
                    reads=reads if sum_so_far < 0 else [*reads, sum_so_far],
                    phase=Phase.BACKWARD, partner=self.forward[row, time],
                    flops=4.0 * self.batch * weight.elements, module=weight.module,
                )  # fmt: skip
                if row:
                    down = self.builder.tensor(
                        f"{name}.gradient_down", self.state_bytes, producer=op
                    )
                    received[row - 1, time].append(down)
                if time and row < self.num_layers:
                    back = self.builder.tensor(
                        # State and output both flow back in time.
                        f"{name}.gradient_back",
                        2 * self.state_bytes,
                        producer=op,
                    )
                    received[row, time - 1].append(back)
                self.weight_gradients[row] = _add_gradient(
                    self.builder, weight._replace(prefix=name), op, sum_so_far
                )

    def _inputs(self, row: int, time: int) -> list[int]:
        """Weight, output of the layer below, and output of the previous time step."""
        keys = [(row - 1, time)] + ([(row, time - 1)] if row < self.num_layers else [])
        outputs = (self.outputs[key] for key in keys if key in self.outputs)
        return [self.weights[row].tensor, *outputs]


# Transformer

_VOCABULARY = 50_257
_OPS_PER_BLOCK = 34
_OPS_OUTSIDE = 9
TRANSFORMER_MIN_OPS = _OPS_OUTSIDE + _OPS_PER_BLOCK
_INPUT = "input"
"""Name for the output of the previous block; in the first block, of the embedding."""

_Key = tuple[str, int]
"""A layer's name and its block; 0 for layers outside the blocks."""


class _ForwardOp(NamedTuple):
    """One forward op, of every block or outside the blocks."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: int
    """Number of elements of the output."""
    flops: float
    weights: int = 0
    """Number of elements of the parameter; 0 if it has none."""
    in_block: bool = True

    @property
    def has_weight_op(self) -> bool:
        """True if a separate backward op makes the gradient of the weight."""
        return self.kind == "matmul" and self.weights > 0

    def prefix(self, block: int) -> str:
        """Prefix of names, such as ``blocks.3.attn.qkv``."""
        return f"blocks.{block}.{self.name}" if self.in_block else self.name

    def module(self, block: int) -> str:
        """Module path: ``blocks.3.attn`` for ``blocks.3.attn.qkv``."""
        part = self.name.split(".")[0]
        return f"blocks.{block}.{part}" if self.in_block else part


def _layers(hidden: int, heads: int, sequence: int, batch: int) -> list[_ForwardOp]:
    h, t = hidden, batch * sequence
    scores = t * heads * sequence
    product = 2.0 * t * sequence * h
    words, head = _VOCABULARY * h, 2.0 * t * h * _VOCABULARY
    return [
        _ForwardOp("embed", "embedding", (), t * h, 0.0, words, in_block=False),
        _ForwardOp("ln1", "layer_norm", (_INPUT,), t * h, 8.0 * t * h, 2 * h),
        _ForwardOp("attn.qkv", "matmul", ("ln1",), 3 * t * h, 6.0 * t * h * h, 3 * h * h),
        _ForwardOp("attn.scores", "matmul", ("attn.qkv",), scores, product),
        _ForwardOp("attn.softmax", "softmax", ("attn.scores",), scores, 5.0 * scores),
        _ForwardOp("attn.context", "matmul", ("attn.softmax", "attn.qkv"), t * h, product),
        _ForwardOp("attn.proj", "matmul", ("attn.context",), t * h, 2.0 * t * h * h, h * h),
        _ForwardOp("add1", "add", (_INPUT, "attn.proj"), t * h, 1.0 * t * h),
        _ForwardOp("ln2", "layer_norm", ("add1",), t * h, 8.0 * t * h, 2 * h),
        _ForwardOp("mlp.fc", "matmul", ("ln2",), 4 * t * h, 8.0 * t * h * h, 4 * h * h),
        _ForwardOp("mlp.gelu", "gelu", ("mlp.fc",), 4 * t * h, 40.0 * t * h),
        _ForwardOp("mlp.out", "matmul", ("mlp.gelu",), t * h, 8.0 * t * h * h, 4 * h * h),
        _ForwardOp("add2", "add", ("add1", "mlp.out"), t * h, 1.0 * t * h),
        _ForwardOp("head", "matmul", ("add2",), t * _VOCABULARY, head, words, in_block=False),
        _ForwardOp("loss", "cross_entropy", ("head",), 1, 5.0 * t * _VOCABULARY, in_block=False),
    ]


def transformer(num_ops: int, seed: int) -> Graph:
    """A training step of whole blocks of 34 ops: at most 17 ops off the requested number."""
    source = np.random.RandomState(seed)
    hidden, heads = ((768, 12), (1024, 16), (1280, 20), (1600, 25))[source.randint(0, 4)]
    sequence, batch = 256 << source.randint(0, 3), 1 << source.randint(0, 4)
    num_blocks = max(1, round((num_ops - _OPS_OUTSIDE) / _OPS_PER_BLOCK))
    builder = GraphBuilder(f"transformer-{num_ops}")
    tokens = builder.tensor("tokens", batch * sequence * 8, role=Role.INPUT)
    step = _TransformerStep(builder, num_blocks, _layers(hidden, heads, sequence, batch), tokens)
    order = list(step.in_order())
    for layer, block in order:
        step.add_forward(layer, block)
    # The reverse of forward order is a valid order for backward ops.
    for layer, block in reversed(order):
        step.add_backward(layer, block)
    states = {key: _add_state(builder, weight) for key, weight in step.weights.items()}
    for layer, block in order:
        if layer.weights:
            key = layer.name, block
            _add_adamw(builder, step.weights[key], step.weight_gradients[key], states[key])
    return finished(
        builder, family="transformer", num_ops=num_ops, seed=seed, blocks=num_blocks,
        hidden=hidden, heads=heads, sequence=sequence, batch=batch,
    )  # fmt: skip


class _TransformerStep:
    """Ops and tensors built so far."""

    def __init__(
        self, builder: GraphBuilder, num_blocks: int, layers: list[_ForwardOp], tokens: int
    ) -> None:
        self.builder, self.num_blocks, self.layers, self.tokens = (
            builder,
            num_blocks,
            layers,
            tokens,
        )
        self.elements = {layer.name: layer.outputs for layer in layers}
        self.elements[_INPUT] = self.elements["embed"]
        self.forward: dict[_Key, int] = {}
        self.outputs: dict[_Key, int] = {}
        self.gradients: dict[_Key, list[int]] = defaultdict(list)
        """By layer and block: gradients of the output, one per reader."""
        self.weights = {
            (layer.name, block): _add_weight(
                builder, layer.prefix(block), layer.module(block), layer.weights
            )
            for layer in layers
            if layer.weights
            for block in range(num_blocks if layer.in_block else 1)
        }
        self.weight_gradients: dict[_Key, int] = {}

    def in_order(self) -> Iterator[tuple[_ForwardOp, int]]:
        """Yield the layers of the forward pass in order, each with its block."""
        first = next(i for i, layer in enumerate(self.layers) if layer.in_block)
        inner = [layer for layer in self.layers if layer.in_block]
        yield from ((layer, 0) for layer in self.layers[:first])
        yield from ((layer, block) for block in range(self.num_blocks) for layer in inner)
        yield from ((layer, 0) for layer in self.layers[first + len(inner) :])

    def source(self, layer: _ForwardOp, block: int, name: str) -> _Key:
        """Layer and block that make the named input of a layer."""
        if name == _INPUT:
            return ("add2", block - 1) if block else ("embed", 0)
        if name == "add2" and not layer.in_block:
            return name, self.num_blocks - 1
        return name, block

    def saved(self, layer: _ForwardOp, block: int) -> list[int]:
        """Outputs of other layers that a layer reads."""
        return [self.outputs[self.source(layer, block, name)] for name in layer.inputs]

    def add_forward(self, layer: _ForwardOp, block: int) -> None:
        """Add the forward op of a layer and its output."""
        key, prefix = (layer.name, block), layer.prefix(block)
        self.forward[key] = self.builder.op(
            prefix, layer.kind, reads=[*self.saved(layer, block), *self._own(layer, block)],
            flops=layer.flops, module=layer.module(block),
        )  # fmt: skip
        self.outputs[key] = self.builder.tensor(
            f"{prefix}.out", layer.outputs * _FLOAT_BYTES, producer=self.forward[key],
            role=Role.OUTPUT if layer.name == "loss" else Role.ACTIVATION,
        )  # fmt: skip

    def add_backward(self, layer: _ForwardOp, block: int) -> None:
        """Add the backward ops of a layer with the gradients that they make."""
        key = layer.name, block
        reads = [self.outputs[key]] if layer.kind in ("softmax", "cross_entropy") else []
        if layer.kind not in ("softmax", "add"):
            reads += [*self.saved(layer, block), *self._own(layer, block)]
        op = self._backward_op(layer, block, ".backward", reads)
        self._add_input_gradients(layer, block, op)
        if layer.has_weight_op:
            op = self._backward_op(layer, block, ".backward_weight", self.saved(layer, block))
        if layer.weights:
            self.weight_gradients[key] = _add_gradient(self.builder, self.weights[key], op)

    def _own(self, layer: _ForwardOp, block: int) -> list[int]:
        """Weight and tokens that a layer reads."""
        own = [self.weights[layer.name, block].tensor] if layer.weights else []
        return [*own, self.tokens] if layer.name == "embed" else own

    def _backward_op(self, layer: _ForwardOp, block: int, suffix: str, reads: list[int]) -> int:
        # A product needs two products of the same size backward, in one op or in two.
        return self.builder.op(
            f"{layer.prefix(block)}{suffix}", layer.kind + suffix,
            reads=[*reads, *self.gradients[layer.name, block]], phase=Phase.BACKWARD,
            flops=layer.flops if layer.has_weight_op else 2 * layer.flops,
            partner=self.forward[layer.name, block], module=layer.module(block),
        )  # fmt: skip

    def _add_input_gradients(self, layer: _ForwardOp, block: int, op: int) -> None:
        gradient = -1
        for name in layer.inputs:
            # The gradient of a sum is the same for all that was added.
            if gradient < 0 or layer.kind != "add":
                gradient = self.builder.tensor(
                    f"{layer.prefix(block)}.gradient_of_{name}",
                    self.elements[name] * _FLOAT_BYTES,
                    producer=op,
                )
            self.gradients[self.source(layer, block, name)].append(gradient)
