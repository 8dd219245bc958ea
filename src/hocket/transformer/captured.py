"""The shape of a transformer read back from the graph of one of its training steps.

Sizes are in the texts of the ops' signatures and in the bytes and names of the parameters; what
they do not show is asked for by the name of the key in a TOML file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hocket.base.errors import InputFileError
from hocket.graph.signatures import tensor_shapes
from hocket.transformer.shape import Transformer

if TYPE_CHECKING:
    from hocket.graph.graph import Graph

_LAYER = re.compile(r"(.*?\.)?([0-9]+)\.(.+)")
_EXPERTS = re.compile(r"experts?\b|router|gate\.weight", re.IGNORECASE)
_MLP = re.compile(r"\b(mlp|ffn|feed_forward|fc1|fc2|dense_h_to_4h|dense_4h_to_h)\b")
_PARAMETER = 1
"""`hocket.graph.Role.PARAMETER`."""


def from_graph(graph: Graph) -> Transformer:
    """The model whose training step was captured; raises `InputFileError` naming what is lacking.

    Mixtures of experts, and models that are no stack of equal layers, are not recognised.
    """
    embeddings = list(_embeddings(graph))
    parameters = _parameters(graph)
    layers = _layers(parameters)
    queries, keys = _attention(graph)
    lacking = [
        key
        for key, found in (
            ("hidden, vocabulary, sequence", embeddings),
            ("layers", layers),
            ("heads, head_width", queries),
        )
        if not found
    ]
    if lacking or any(_EXPERTS.search(name) for name in layers[0]):
        lacking = lacking or ["experts"]
        raise InputFileError(
            f"the graph {graph.name!r} does not show {' and '.join(lacking)}",
            hint="describe the model in a TOML file with these keys",
        )
    (vocabulary, hidden), tokens = max(embeddings)
    element_bytes = _bytes_of(parameters, vocabulary * hidden)
    heads, head_width = queries[1], queries[3]
    widths = [
        size // element_bytes // hidden
        for name, size in layers[0].items()
        if _MLP.search(name) and size >= element_bytes * hidden**2
    ]
    if not widths:
        raise InputFileError(
            f"the graph {graph.name!r} does not show mlp_width",
            hint="describe the model in a TOML file with this key",
        )
    kv_heads = _kv_heads(layers[0], element_bytes * hidden * head_width, keys[1])
    return Transformer(
        name=graph.name,
        hidden=hidden,
        layers=len(layers),
        heads=heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_width=head_width,
        mlp_width=min(widths),
        mlp="swiglu" if len(widths) >= 3 else "gelu",
        vocabulary=vocabulary,
        sequence=tokens[-1],
        tied_embeddings=list(parameters.values()).count(vocabulary * hidden * element_bytes) < 2,
        learned_positions=len({table for table, _ in embeddings}) > 1,
        biases=any(name.endswith("bias") for name in layers[0]),
        dropout=any("bernoulli" in kind or "dropout" in kind for kind in graph.kinds),
        source=f"graph {graph.name!r}",
    )


def _embeddings(graph: Graph) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
    """Shape of each embedding's table and of the tokens that it is given."""
    for text in graph.signatures:
        if text.startswith("aten.embedding."):
            shapes = tensor_shapes(text)
            if len(shapes) >= 2 and len(shapes[0]) == 2 and shapes[1]:
                yield (shapes[0][0], shapes[0][1]), shapes[1]


def _layers(parameters: dict[str, int]) -> list[dict[str, int]]:
    """Bytes of each layer's parameters by name, of the longest run of numbered modules."""
    stacks: dict[str, dict[int, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for name, size in parameters.items():
        match = _LAYER.fullmatch(name)
        if match:
            stacks[match[1] or ""][int(match[2])][match[3]] = size
    if not stacks:
        return []
    stack = max(stacks.values(), key=len)
    return [stack[index] for index in sorted(stack)]


def _attention(graph: Graph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of queries and keys: sequence by sequence, head, token, element."""
    for text in graph.signatures:
        if "scaled_dot_product" in text and "backward" not in text:
            shapes = tensor_shapes(text)
            if len(shapes) >= 2 and len(shapes[0]) == len(shapes[1]) == 4:
                return shapes[0], shapes[1]
    return (), ()


def _kv_heads(layer: dict[str, int], bytes_per_head: int, seen: int) -> int:
    """Heads of the matrix of keys: attention may be given keys that were repeated before."""
    sizes = [size for name, size in layer.items() if name.endswith("k_proj.weight")]
    return max(1, sizes[0] // bytes_per_head) if sizes else seen


def _bytes_of(parameters: dict[str, int], num_elements: int) -> int:
    """Bytes of one element of the parameters, from one whose number of elements is known."""
    sizes = (size / num_elements for size in parameters.values())
    return int(min((size for size in sizes if size in (1, 2, 4, 8)), default=4))


def _parameters(graph: Graph) -> dict[str, int]:
    """Bytes of the parameters as they are before the step; the optimizer makes new ones."""
    is_one = (graph.tensor_role == _PARAMETER) & (graph.tensor_producer < 0)
    return {graph.tensor_names[i]: int(graph.tensor_bytes[i]) for i in is_one.nonzero()[0]}
