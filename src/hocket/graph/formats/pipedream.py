"""Reader of the ``graph.txt`` profiles of msr-fiddle/pipedream: lines for layers and for edges.

A layer becomes a forward op and a backward op. Activations go to the following layers and to the
layer's own backward op; gradients of the same size go back along every edge. O(layers + edges).
"""

from __future__ import annotations

import io
import re
from itertools import islice
from typing import NamedTuple

import numpy as np

from hocket.base.errors import InputFileError, did_you_mean
from hocket.base.fields import shown
from hocket.graph.build import GraphBuilder
from hocket.graph.columns import MAX_BYTES
from hocket.graph.graph import ANY_KIND, Graph, Phase, Role, StatedTimes
from hocket.graph.verify import MAX_SECONDS

FORMAT = "pipedream"

_LAYER = re.compile(
    r"(?P<id>.+?) -- (?P<description>.*?) -- forward_compute_time=(?P<forward>[^,]*), "
    r"backward_compute_time=(?P<backward>[^,]*), activation_size=(?P<activation>[^,]*), "
    r"parameter_size=(?P<parameter>[^, ]*)(?: -- stage_id=[0-9]{1,9})?\s*"
)
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_PICK = re.compile(r"__getitem__\(([0-9]{1,4})\)")
_MAX_LINE = 100_000


class _PipeDreamLayer(NamedTuple):
    id: str
    kind: str
    description: str
    forward_s: float
    backward_s: float
    activation_bytes: tuple[int, ...]
    parameter_bytes: int


def is_pipedream(head: bytes) -> bool:
    """True if a file that starts with ``head`` looks like this format."""
    first_line = head.lstrip(b"\r\n").split(b"\n", 1)[0]
    return b" -- " in first_line and b"forward_compute_time=" in first_line


def graph_from_pipedream(data: bytes, name: str) -> Graph:
    """Convert a complete file into a graph."""
    layers: dict[str, _PipeDreamLayer] = {}
    edges: dict[tuple[str, str], int] = {}
    # Line by line, so that a wrong file is rejected at its first wrong line.
    for number, raw in enumerate(io.BytesIO(data), start=1):
        line = _text(raw, number)
        if line.startswith("\t"):
            # The first line that has an edge is named in errors; repeated edges count once.
            edges.setdefault(_edge(line, number), number)
        elif line.strip():
            layer = _layer(line, number)
            if layer.id in layers:
                raise _wrong(number, f"repeats the node {shown(layer.id)}", "ids must differ")
            layers[layer.id] = layer
    for edge, number in edges.items():
        for end in edge:
            if end not in layers:
                # Among a million nodes the search for similar names would take minutes, and names
                # as long as lines may be would fill the hint.
                hint = did_you_mean(end, [known[:60] for known in islice(layers, 1000)])
                raise _wrong(number, f"names an unknown node {shown(end)}", hint)
    return _built(list(layers.values()), list(edges), name)


def _text(raw: bytes, number: int) -> str:
    if len(raw) > _MAX_LINE:
        raise _wrong(number, f"has {len(raw)} bytes", f"{_MAX_LINE} are allowed")
    try:
        return raw.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise _wrong(number, "is not UTF-8", "save the file as UTF-8") from None


def _edge(line: str, number: int) -> tuple[str, str]:
    ends = line.strip().split(" -- ")
    if len(ends) != 2 or not all(ends):
        raise _wrong(number, f"is {shown(line)}", "an edge is a tab, then 'node1 -- node2'")
    return ends[0], ends[1]


def _layer(line: str, number: int) -> _PipeDreamLayer:
    found = _LAYER.fullmatch(line)
    if found is None:
        raise _wrong(
            number,
            f"is {shown(line)}",
            "a node is 'id -- description -- forward_compute_time=…, backward_compute_time=…, "
            "activation_size=…, parameter_size=… -- stage_id=…', the last part optional",
        )
    sizes = found["activation"]
    is_list = sizes.startswith("[") and sizes.endswith("]")
    description = " ".join(found["description"].split())
    return _PipeDreamLayer(
        id=found["id"],
        kind=description.split("(")[0].strip() or "layer",
        description=description,
        forward_s=_number(found["forward"], number, MAX_SECONDS * 1e3) / 1e3,
        backward_s=_number(found["backward"], number, MAX_SECONDS * 1e3) / 1e3,
        activation_bytes=tuple(
            _bytes(text.strip(), number)
            for text in (sizes[1:-1].split(";") if is_list else [sizes])
        ),
        parameter_bytes=_bytes(found["parameter"], number),
    )


def _bytes(text: str, number: int) -> int:
    return round(_number(text, number, MAX_BYTES))


def _number(text: str, number: int, high: float) -> float:
    # The length is checked first: the pattern alone would accept digits without end.
    if len(text) > 400 or _NUMBER.fullmatch(text) is None or float(text) > high:
        raise _wrong(
            number, f"has the value {shown(text)}", f"expected a number from 0 to {high:g}"
        )
    return float(text)


def _wrong(number: int, what: str, hint: str) -> InputFileError:
    return InputFileError(f"line {number} {what}", hint=hint)


def _built(layers: list[_PipeDreamLayer], edges: list[tuple[str, str]], name: str) -> Graph:
    builder = GraphBuilder(name)
    for layer in layers:
        builder.op(layer.id, layer.kind, module=layer.id)
    outputs = [_add_layer(builder, layers, index) for index in range(len(layers))]
    index_of = {layer.id: index for index, layer in enumerate(layers)}
    for src_id, dst_id in edges:
        src, dst = index_of[src_id], index_of[dst_id]
        used = _used(outputs[src], layers[dst])
        for tensor in used:
            builder.read(dst, tensor)
        gradient = builder.tensor(
            # The gradient of an output has the same size as the part of it that the layer reads.
            f"{dst_id}.gradient for {src_id}",
            sum(builder.tensors[tensor]["bytes"] for tensor in used),
            producer=len(layers) + dst,
        )
        builder.read(len(layers) + src, gradient)
        if len(used) < len(outputs[src]):
            # Picking one of several outputs copies nothing.
            builder.tensors[outputs[dst][0]]["alias_of"] = used[0]
    seconds = [layer.forward_s for layer in layers] + [layer.backward_s for layer in layers]
    stated = StatedTimes({ANY_KIND: np.array(seconds)})
    return builder.build(stated=stated, meta={"format": FORMAT})


def _add_layer(builder: GraphBuilder, layers: list[_PipeDreamLayer], index: int) -> list[int]:
    """Add a layer's backward op, parameter and outputs; returns the outputs."""
    layer = layers[index]
    backward = builder.op(
        f"{layer.id}.backward",
        f"{layer.kind}.backward",
        phase=Phase.BACKWARD,
        partner=index,
        module=layer.id,
    )
    if layer.parameter_bytes:
        label = f"{layer.id}.parameter"
        parameter = builder.tensor(label, layer.parameter_bytes, role=Role.PARAMETER)
        builder.read(index, parameter)
        builder.read(backward, parameter)
        builder.tensor(
            f"{label}.gradient", layer.parameter_bytes, producer=backward, role=Role.GRADIENT
        )
    several = len(layer.activation_bytes) > 1
    outputs = [
        builder.tensor(f"{layer.id}.output{f'.{k}' if several else ''}", size, producer=index)
        for k, size in enumerate(layer.activation_bytes)
    ]
    for tensor in outputs:
        builder.read(backward, tensor)
    return outputs


def _used(outputs: list[int], reader: _PipeDreamLayer) -> list[int]:
    """Outputs that a layer reads: all of them, or the one that it selects by position."""
    pick = _PICK.fullmatch(reader.description)
    if pick is None or len(outputs) < 2 or int(pick[1]) >= len(outputs):
        return outputs
    return [outputs[int(pick[1])]]
