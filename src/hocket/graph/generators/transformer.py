"""Transformer training step: a stack of equal blocks with attention and MLP, AdamW at the end.

One table describes the layers; each layer is made for all blocks at once. A backward op reads the
gradients of its layer's output and the activations that the layer saved, and makes a gradient for
each of its inputs; matrix products have a second backward op for their weight. O(blocks).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hocket.graph.generators.batch import BatchBuilder, Numbers
from hocket.graph.generators.plain import chance
from hocket.graph.graph import Graph, Phase, Role

_FLOAT_BYTES = 4
_VOCABULARY = 50_257
_OPS_PER_BLOCK = 34
_OPS_OUTSIDE = 9
MIN_OPS = _OPS_OUTSIDE + _OPS_PER_BLOCK
_INPUT = "input"
"""Name for the output of the previous block; in the first block, of the embedding."""


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
    source = chance(seed)
    hidden, heads = ((768, 12), (1024, 16), (1280, 20), (1600, 25))[source.randint(0, 4)]
    sequence, batch = 256 << source.randint(0, 3), 1 << source.randint(0, 4)
    num_blocks = max(1, round((num_ops - _OPS_OUTSIDE) / _OPS_PER_BLOCK))
    builder = BatchBuilder(f"transformer-{num_ops}")
    step = _Step(builder, num_blocks, _layers(hidden, heads, sequence, batch))
    tokens = builder.tensors(["tokens"], batch * sequence * 8, role=Role.INPUT)
    step.add_forward()
    builder.reads(step.forward["embed"], tokens)
    step.add_backward()
    builder.reads(step.backward["embed"], tokens)
    step.add_gradient_reads()
    step.add_optimizer()
    return builder.build(
        {
            "family": "transformer",
            "num_ops": num_ops,
            "seed": seed,
            "blocks": num_blocks,
            "hidden": hidden,
            "heads": heads,
            "sequence": sequence,
            "batch": batch,
        }
    )


@dataclass
class _Step:
    """Ops and tensors built so far; arrays per layer have one entry per block."""

    builder: BatchBuilder
    num_blocks: int
    layers: list[_ForwardOp]
    num_positions: int = 0
    forward: dict[str, Numbers] = field(default_factory=dict)
    backward: dict[str, Numbers] = field(default_factory=dict)
    outputs: dict[str, Numbers] = field(default_factory=dict)
    weights: dict[str, Numbers] = field(default_factory=dict)
    weight_gradients: dict[str, Numbers] = field(default_factory=dict)
    gradient_readers: dict[str, list[Numbers]] = field(default_factory=dict)
    """Backward ops that need the gradient of a layer's output."""
    gradients: list[tuple[str, Numbers, Numbers]] = field(default_factory=list)
    """(layer, blocks, tensors): gradients of the layer's output in these blocks."""

    def names(self, layer: _ForwardOp, suffix: str = "") -> list[str]:
        """Names of a layer's ops or tensors."""
        if not layer.in_block:
            return [f"{layer.name}{suffix}"]
        return [f"blocks.{block}.{layer.name}{suffix}" for block in range(self.num_blocks)]

    def modules(self, layer: _ForwardOp) -> list[str]:
        """Module paths: ``blocks.3.attn`` for ``blocks.3.attn.qkv``."""
        part = layer.name.split(".")[0]
        if not layer.in_block:
            return [part]
        return [f"blocks.{block}.{part}" for block in range(self.num_blocks)]

    def inputs(self, layer: _ForwardOp) -> Iterator[tuple[str, Numbers, Numbers]]:
        """Yield, per input: the layer that makes it, in which blocks, and its readers' blocks."""
        every = np.arange(self.num_blocks if layer.in_block else 1)
        for name in layer.inputs:
            if name == _INPUT:
                yield "embed", every[:1], every[:1]
                yield "add2", every[:-1], every[1:]
            elif name == "add2" and not layer.in_block:
                yield "add2", every + self.num_blocks - 1, every
            else:
                yield name, every, every

    def read_inputs(self, ops: Numbers, layer: _ForwardOp) -> None:
        """Add reads of the layer's inputs to ops of the layer."""
        for name, blocks, readers in self.inputs(layer):
            self.builder.reads(ops[readers], self.outputs[name][blocks])
        if layer.weights:
            self.builder.reads(ops, self.weights[layer.name])

    def add_forward(self) -> None:
        """Add forward ops with their weights and outputs."""
        positions = self._positions(self.layers, reverse=False)
        for layer in self.layers:
            op = self.builder.ops(
                self.names(layer),
                layer.kind,
                position=next(positions),
                flops=layer.flops,
                modules=self.modules(layer),
            )
            self.forward[layer.name] = op
            self.outputs[layer.name] = self.builder.tensors(
                self.names(layer, ".out"),
                layer.outputs * _FLOAT_BYTES,
                producer=op,
                role=Role.OUTPUT if layer.name == "loss" else Role.ACTIVATION,
            )
            if layer.weights:
                self.weights[layer.name] = self.builder.tensors(
                    self.names(layer, ".weight"),
                    layer.weights * _FLOAT_BYTES,
                    role=Role.PARAMETER,
                )
        for layer in self.layers:
            self.read_inputs(self.forward[layer.name], layer)

    def add_backward(self) -> None:
        """Add backward ops, with the saved activations they read and the gradients they make."""
        last_first = self.layers[::-1]
        rows = [layer for layer in last_first for _ in range(1 + layer.has_weight_op)]
        positions = self._positions(rows, reverse=True)
        for layer in last_first:
            op = self._backward_ops(layer, ".backward", next(positions))
            self.backward[layer.name] = op
            self.gradient_readers[layer.name] = [op]
            if layer.kind in ("softmax", "cross_entropy"):
                self.builder.reads(op, self.outputs[layer.name])
            if layer.kind not in ("softmax", "add"):
                self.read_inputs(op, layer)
            self._add_input_gradients(layer, op)
            maker = op
            if layer.has_weight_op:
                maker = self._backward_ops(layer, ".backward_weight", next(positions))
                self.gradient_readers[layer.name].append(maker)
                for name, blocks, readers in self.inputs(layer):
                    self.builder.reads(maker[readers], self.outputs[name][blocks])
            if layer.weights:
                self.weight_gradients[layer.name] = self.builder.tensors(
                    self.names(layer, ".weight_gradient"),
                    layer.weights * _FLOAT_BYTES,
                    producer=maker,
                    role=Role.GRADIENT,
                )

    def add_gradient_reads(self) -> None:
        """Let the backward ops of each layer read the gradients of its output."""
        for name, blocks, tensors in self.gradients:
            for ops in self.gradient_readers[name]:
                self.builder.reads(ops[blocks], tensors)

    def add_optimizer(self) -> None:
        """Add one AdamW op per weight, which updates it in place."""
        rows = [layer for layer in self.layers if layer.weights]
        positions = self._positions(rows, reverse=False)
        for layer in rows:
            weight, size_bytes = self.weights[layer.name], layer.weights * _FLOAT_BYTES
            op = self.builder.ops(
                self.names(layer, ".update"),
                "adamw",
                phase=Phase.OPTIMIZER,
                position=next(positions),
                flops=12.0 * layer.weights,
                modules=self.modules(layer),
            )
            state = self.builder.tensors(
                self.names(layer, ".adamw_state"), 2 * size_bytes, role=Role.OPTIMIZER_STATE
            )
            for tensors in (weight, self.weight_gradients[layer.name], state):
                self.builder.reads(op, tensors)
            self.builder.tensors(
                self.names(layer, ".weight_updated"),
                size_bytes,
                producer=op,
                role=Role.PARAMETER,
                alias_of=weight,
            )

    def _backward_ops(self, layer: _ForwardOp, suffix: str, position: Numbers) -> Numbers:
        # A product needs two products of the same size backward, in one op or in two.
        return self.builder.ops(
            self.names(layer, suffix),
            layer.kind + suffix,
            phase=Phase.BACKWARD,
            position=position,
            flops=layer.flops if layer.has_weight_op else 2 * layer.flops,
            partner=self.forward[layer.name],
            modules=self.modules(layer),
        )

    def _add_input_gradients(self, layer: _ForwardOp, op: Numbers) -> None:
        elements = {other.name: other.outputs for other in self.layers}
        elements[_INPUT] = elements["embed"]
        made: dict[str, Numbers] = {}
        # The gradient of a sum is the same for all that was added.
        for name in layer.inputs[:1] if layer.kind == "add" else layer.inputs:
            made[name] = self.builder.tensors(
                self.names(layer, f".gradient_of_{name}"),
                elements[name] * _FLOAT_BYTES,
                producer=op,
            )
        for name in layer.inputs:
            gradient = made.get(name, made[layer.inputs[0]])
            single = layer._replace(inputs=(name,))
            for maker, blocks, readers in self.inputs(single):
                self.gradients.append((maker, blocks, gradient[readers]))

    def _positions(self, rows: list[_ForwardOp], reverse: bool) -> Iterator[Numbers]:
        """Yield the positions of each row's ops: block after block, a block's rows together."""
        block = np.arange(self.num_blocks)[:: -1 if reverse else 1]
        num_inner = sum(row.in_block for row in rows)
        start = self.num_positions
        self.num_positions += len(rows) - num_inner + num_inner * self.num_blocks
        seen_inner = 0
        for row in rows:
            if row.in_block:
                yield start + seen_inner + block * num_inner
                seen_inner += 1
            elif seen_inner:
                yield np.array([start + num_inner * (self.num_blocks - 1) + seen_inner])
                start += 1
            else:
                yield np.array([start])
                start += 1
