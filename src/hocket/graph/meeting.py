"""Find ops that mix the samples of a batch, from the recorded ops alone, without running them.

The shapes of an op at two batch sizes show which of its extents grow with the samples. An op that
works along such an extent (a running sum, a sort, a product that contracts it) lets samples
interact. An op whose result lacks the extent is a sum or mean over samples, after which only linear
ops may follow until the loss. If neither is found, samples are independent. Views that merge parts
of several samples into an extent that does not grow are not detected. Batch norm is ignored here:
the planner of the batch decides how to treat it. O(ops).
"""

from __future__ import annotations

import re
from dataclasses import replace
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray
from hocket.graph.batches import unsplit
from hocket.graph.graph import Graph, Phase, Role
from hocket.graph.signatures import tensor_shapes

SAMPLES = "samples"
"""Key in a graph's ``meta`` of the note on whether its samples are independent."""
_WHOLE = re.compile(r"-?[0-9]+")


class Dependence(IntEnum):
    """How a tensor depends on the samples of the batch."""

    NONE = 0
    SAMPLES = 1
    """Each sample has its own part of the tensor."""
    MEAN = 2
    """A mean over samples, or a linear function of one."""
    TOTAL = 3
    """A sum over samples, or a linear function of one."""


class GrowingShape(NamedTuple):
    """Per extent of a tensor in a signature: whether it grows with the batch."""

    grows: tuple[bool, ...]

    def along(self, dim: int) -> bool:
        """True if an extent grows with the batch; False if there is no such extent."""
        return -len(self.grows) <= dim < len(self.grows) and self.grows[dim]


class OpText(NamedTuple):
    """An op as described by its signatures at two batch sizes."""

    name: str
    """Name without namespace, overload and in-place underscore."""
    tensors: tuple[GrowingShape, ...]
    args: tuple[str, ...]
    """Positional arguments in order, tensors included."""
    named: dict[str, str]
    others: tuple[str, ...]
    """Arguments in order at the other batch size."""

    def dim(self, position: int, default: int = -1, name: str = "dim") -> int:
        """Integer argument by position or name, such as a dim; ``default`` if it is not given."""
        text = self.named.get(name, self.args[position] if position < len(self.args) else "")
        return int(text) if _WHOLE.fullmatch(text) else default


_ALONG = {
    "cumsum": 1, "cumprod": 1, "logcumsumexp": 1, "cummax": 1, "cummin": 1, "_softmax": 1,
    "_log_softmax": 1, "softmax": 1, "log_softmax": 1, "sort": 1, "argsort": 1, "topk": 2,
    "kthvalue": 2, "median": 1, "mode": 1, "unfold": 1,
}  # fmt: skip
"""Ops that work along one dim, and the position of that dim among their arguments."""
_WINDOWS = re.compile(r"conv|pool|upsample|group_norm|instance_norm|im2col|grid_sampler")
"""Ops of which only the first extent (samples) may grow."""
_CONTRACTED = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "addbmm": (1, 2)}
"""Matrix products: positions of their two factors; the last dim of the first is contracted."""
_PICKS = ("index", "index_select", "gather", "scatter", "scatter_add", "index_copy", "index_add",
          "index_put", "_index_put_impl", "take_along_dim")  # fmt: skip
"""Ops that read or write at positions given by an index tensor."""
_MADE = re.compile(r"(zeros|ones|full|empty|rand|randn|randint)(_like)?|new_.*|empty_.*")
"""Ops that use the shape of a tensor but not its values."""
_LINEAR = frozenset({
    "add", "sub", "rsub", "mul", "div", "neg", "clone", "detach", "alias", "view", "_unsafe_view",
    "reshape", "expand", "squeeze", "unsqueeze", "sum", "mean", "stack", "cat", "select", "slice",
    "_to_copy", "copy", "t", "transpose", "permute", "as_strided", "unbind", "split",
})  # fmt: skip
_REDUCTIONS = {
    "nll_loss_forward": 3, "nll_loss2d_forward": 3, "nll_loss": 3, "mse_loss": 2, "l1_loss": 2,
    "smooth_l1_loss": 2, "huber_loss": 2, "binary_cross_entropy": 3, "soft_margin_loss": 2,
    "binary_cross_entropy_with_logits": 4, "kl_div": 2,
}  # fmt: skip
"""Losses, and the position of their ``reduction`` argument."""
_MEAN_REDUCTION, _SUM_REDUCTION = 1, 2


def reading_samples(graph: Graph) -> Graph:
    """Return the graph, marked as unsplittable if an op before the loss mixes samples."""
    # Only training steps have a batch that is split, and these have an optimizer.
    if graph.other_batch is None or graph.meta.get("optimizer") is None:
        return graph
    if met := where_samples_meet(graph):
        return unsplit(graph, met)
    tried = graph.meta.get(SAMPLES)
    note = f"no cross-sample ops found{f'; {tried}' if tried else ''}"
    return replace(graph, meta={**graph.meta, SAMPLES: note})


def where_samples_meet(graph: Graph) -> str:
    """Describe the first op before the loss that mixes samples; empty if there is none."""
    other = graph.other_batch
    if other is None or not len(graph.op_signature):
        return ""
    grows = graph.tensor_bytes != other.tensor_bytes
    state = np.zeros(graph.num_tensors, dtype=np.int8)
    state[(graph.tensor_role == Role.INPUT) & (graph.tensor_producer < 0)] = Dependence.SAMPLES
    # A division by the batch size differs by this ratio between the two captures.
    ratio = other.other_samples / other.num_samples
    routed = _routed(graph)
    for op in np.flatnonzero(_leads_to_loss(graph)).tolist():
        found = _after(graph, op, state, grows, ratio, graph.module_of(op) in routed)
        if isinstance(found, str):
            module = graph.module_of(op)
            return f"samples meet{f' in {module}' if module else ''}: {found}"
        made = graph.made_by(op)
        state[made.start : made.stop] = found
    is_loss = (graph.tensor_role == Role.OUTPUT) & (graph.tensor_producer >= 0)
    if (state[is_loss] == Dependence.TOTAL).any():
        return "its loss is a sum over samples, not a mean"
    return ""


def _leads_to_loss(graph: Graph) -> BoolArray:
    """Per op: True for forward ops on whose results an output such as the loss depends."""
    needed = graph.tensor_role == Role.OUTPUT
    leads = np.zeros(graph.num_ops, dtype=np.bool_)
    # Backward through the graph: readers mark the tensors that they need before their makers.
    for op in np.flatnonzero(graph.op_phase == Phase.FORWARD)[::-1].tolist():
        made = graph.made_by(op)
        if needed[made.start : made.stop].any():
            leads[op] = True
            needed[graph.reads_of(op)] = True
    return leads


def _routed(graph: Graph) -> set[str]:
    """Modules with grouped matrix products, over tokens that are sorted by expert temporarily."""
    return {graph.module_of(op) for op in range(graph.num_ops) if "grouped_mm" in graph.kind_of(op)}


def _after(
    graph: Graph,
    op: int,
    state: NDArray[np.int8],
    grows: BoolArray,
    ratio: float,
    is_routed: bool,
) -> Dependence | str:
    """Return how the results of an op depend on the samples, or a text on how it mixes them."""
    reads = graph.reads_of(op)
    states = state[reads]
    known = set(states.tolist()) - {Dependence.NONE}
    if not known:
        return Dependence.NONE
    text = _text_of(graph, op)
    if text is None:
        # Without a signature, the op is assumed to treat samples separately.
        return Dependence.SAMPLES
    if _MADE.fullmatch(text.name):
        return Dependence.NONE
    if known & {Dependence.MEAN, Dependence.TOTAL}:
        counts = [_counts_labels(graph, tensor) for tensor in reads.tolist()]
        is_mean = text.name == "div" and (states == Dependence.TOTAL).all() and sum(counts) == 1
        # The count is the divisor, because the loss has the type of the other tensor.
        if is_mean and text.args[1].startswith("int"):
            return Dependence.MEAN
        return _after_sums(text, states, known, ratio)
    made = graph.made_by(op)
    if is_routed:
        # Counts of tokens per expert only determine how tokens are ordered.
        return Dependence(int(grows[made.start : made.stop].any()))
    if met := _along_samples(text, int((states > 0).sum())):
        return met
    is_dropped = grows[reads[states > 0]].any() and not grows[made.start : made.stop].any()
    return _summed(text) if is_dropped else Dependence.SAMPLES


def _counts_labels(graph: Graph, tensor: int) -> bool:
    """True if a tensor is the number of labels that are not ignored, as with label smoothing.

    Cross entropy itself divides by this number. Other counts may depend on the model's output, so
    the mean over all samples would not be a mean of the replicas' means.
    """
    for name in ("sum", "bitwise_not", "eq"):
        producer = int(graph.tensor_producer[tensor])
        if producer < 0 or graph.op_signature[producer] < 0:
            return False
        if not graph.signatures[int(graph.op_signature[producer])].startswith(f"aten.{name}."):
            return False
        tensor = int(graph.reads_of(producer)[0])
    return bool(graph.tensor_role[tensor] == Role.INPUT)


def _after_sums(
    text: OpText, states: NDArray[np.int8], known: set[int], ratio: float
) -> Dependence | str:
    """Return how results of sums or means depend on the samples: only linear ops are allowed."""
    is_product = text.name in ("mul", "div") and int((states > 0).sum()) > 1
    # A product of two sums is not linear, and neither is a sum mixed with single samples.
    if Dependence.SAMPLES in known or text.name not in _LINEAR or is_product:
        return f"{text.name} of a sum or mean over samples"
    if text.name in ("mul", "div") and _scale(text, ratio) and Dependence.MEAN not in known:
        return Dependence.MEAN
    return Dependence.TOTAL if Dependence.TOTAL in known else Dependence.MEAN


def _scale(text: OpText, ratio: float) -> bool:
    """True if the op multiplies or divides a sum by a constant that offsets the batch size."""
    if len(text.args) < 2 or len(text.others) < 2:
        return False
    try:
        grown = float(text.others[1]) / float(text.args[1])
    except (ValueError, ZeroDivisionError):
        return False
    return bool(np.isclose(grown, ratio if text.name == "div" else 1 / ratio))


def _summed(text: OpText) -> Dependence | str:
    """Return how results depend on the samples if they do not grow with the batch but inputs do."""
    if text.name in ("mean", "sum"):
        return Dependence.MEAN if text.name == "mean" else Dependence.TOTAL
    at = _REDUCTIONS.get(text.name)
    if at is not None:
        how = text.dim(at, _MEAN_REDUCTION, "reduction")
        if how in (_MEAN_REDUCTION, _SUM_REDUCTION):
            return Dependence.MEAN if how == _MEAN_REDUCTION else Dependence.TOTAL
    return f"{text.name} over samples"


def _along_samples(text: OpText, num_dependent: int) -> str:
    """Describe an operation along an extent that grows with the batch; empty if there is none."""
    tensors, name = text.tensors, text.name
    if not tensors or "batch_norm" in name:
        return ""
    is_met = False
    if name in _ALONG:
        is_met = tensors[0].along(text.dim(_ALONG[name]))
    elif name in _CONTRACTED and len(tensors) > _CONTRACTED[name][1]:
        is_met = tensors[_CONTRACTED[name][0]].along(-1)
    elif _WINDOWS.search(name):
        is_met = any(tensors[0].grows[1:])
    elif "layer_norm" in name or "rms_norm" in name:
        is_met = text.args[1:2] != text.others[1:2]
    elif "scaled_dot_product" in name or "attention" in name:
        is_met = any(tensor.along(-1) or tensor.along(-2) for tensor in tensors[:3])
    elif name in ("sum", "mean", "amax", "amin", "logsumexp", "var_mean", "var", "std", "prod"):
        dims = [int(d) for d in _WHOLE.findall(text.args[1])] if len(text.args) > 1 else []
        along = {dim % max(len(tensors[0].grows), 1) for dim in dims}
        # A reduction over all extents is a mean or sum over samples, which may be legal before a
        # loss.
        is_kept = any(grows for dim, grows in enumerate(tensors[0].grows) if dim not in along)
        is_met = is_kept and any(tensors[0].along(dim) for dim in dims)
    elif name in _PICKS:
        is_met = _picks_samples(text, num_dependent)
    return f"{name} along them" if is_met else ""


def _picks_samples(text: OpText, num_dependent: int) -> bool:
    """True if values computed from samples decide which samples are picked."""
    picked = text.tensors[0]
    if text.name not in ("index", "index_put", "_index_put_impl"):
        # Along another dim every sample picks for itself.
        return num_dependent > 1 and picked.along(text.dim(1, 0))
    places = _split(text.args[1][1:-1]) if len(text.args) > 1 else []
    given = [dim for dim, place in enumerate(places) if place != "None"]
    along = sum(picked.along(dim) for dim in given)
    # Places that do not depend on samples, such as their own numbers, are those of the samples.
    num_values = 2 if text.name != "index" else 1
    return along > len(given) - max(num_dependent - num_values, 0)


# ── signatures ───────────────────────────────────────────────────────────────────────────────────


def _text_of(graph: Graph, op: int) -> OpText | None:
    """Return an op as described by its signatures; None if they are unknown."""
    other = graph.other_batch
    assert other is not None
    own, away = int(graph.op_signature[op]), int(other.op_signature[op])
    if own < 0 or away < 0:
        return None
    return _op_text(graph.signatures[own], other.signatures[away])


@lru_cache(maxsize=4096)
def _op_text(own: str, away: str) -> OpText | None:
    """Parse an op from its signatures at two sizes; None if their forms differ."""
    head, args = _parted(own)
    _, others = _parted(away)
    name = head.split(".")[1] if "." in head else head
    shapes, shapes_away = tensor_shapes(own), tensor_shapes(away)
    # Different numbers of tensors: the two captures took different paths.
    if len(shapes) != len(shapes_away):
        return None
    tensors = tuple(
        GrowingShape(tuple(x != y for x, y in zip(a, b, strict=False)))
        for a, b in zip(shapes, shapes_away, strict=True)
    )
    plain = tuple(arg for arg in args if not re.match(r"\w+=", arg))
    named = dict(arg.split("=", 1) for arg in args if re.match(r"\w+=", arg))
    return OpText(name.rstrip("_") or name, tensors, plain, named, tuple(others))


def _parted(signature: str) -> tuple[str, list[str]]:
    head, _, rest = signature.partition("(")
    return head, _split(rest.removesuffix(")"))


def _split(text: str) -> list[str]:
    """Split arguments at commas outside of brackets."""
    found, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "[({") - (letter in "])}")
        if letter == "," and depth == 0:
            found.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return [*found, last] if last else found
