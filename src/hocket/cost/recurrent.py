"""Recurrent layers as cuDNN runs them, in graphs that have them word by word.

Appleyard, Kocisky and Blunsom 2016 ("Optimizing Performance of Recurrent Neural Networks on GPUs"):
products with the inputs of all words are one, gradients of weights are summed in one, and what is
left per word and layer is one product with the state and one kernel for all gates, which the
library launches itself. A graph that was captured without a device has ten to thirty ops per word
instead. So its products keep the time of their arithmetic, each word takes the host what cuDNN
takes to launch one, and the ops between them nothing. O(ops), numpy.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray
from hocket.cost.families import FAMILIES, MATRIX_FAMILIES
from hocket.graph.graph import Graph, Phase
from hocket.graph.signatures import tensor_shapes
from hocket.hardware.cluster import DeviceKind

WORD_HOST_S = (24e-6, 17e-6)
"""The host's time per product of a word, of which backward has two. An H200 with its host
(``benchmarks/cost/predict_small.py``): LSTM and GRU of 256 to 2048 units, batches of 16 to 512, one
to four layers, both directions and both types take 18 to 31 us per word forward and 19 to 47
backward, whatever their size, for the host is the slower one; at 2048 units in 32 bits the device
takes 50 and 72. Up to 128 units one kernel stays for all words (3 and 9 us): not counted on."""
WORD_KERNELS = 2
"""Kernels of a word on the device: the product and the gates."""
_WHOLE_LAYER, _WHOLE_NET = "aten.mkldnn_rnn_layer", "aten._cudnn_rnn"
"""Ops that are a layer on a processor, and all layers and directions on a GPU."""
_PRODUCTS = [FAMILIES.index(name) for name in MATRIX_FAMILIES]


def recurrent_ops(graph: Graph) -> NDArray[np.bool_]:
    """Ops of forward and backward passes through recurrent layers: those of noted layers, which
    stand word by word, and cuDNN's own."""
    noted = graph.meta.get("recurrent")
    layers = {path for path in noted if isinstance(path, str)} if isinstance(noted, list) else set()
    # One more than the modules, so that -1 (unknown) reads the last.
    is_inside = np.array([*(path in layers for path in graph.modules), False])
    is_own = np.array([*(kind.startswith(_WHOLE_NET) for kind in graph.kinds), False])
    found = is_inside[graph.op_module] | is_own[graph.op_kind]
    return np.asarray(found & (graph.op_phase != Phase.OPTIMIZER))


def products_of(graph: Graph, family: IntArray) -> FloatArray:
    """Products of words that each op of a recurrent layer stands for; 0 between them.

    Processors run some layers as one op, which has a product per word, and backward two.
    """
    whole = np.array([*(_num_words(text) for text in graph.signatures), 0])[graph.op_signature]
    whole = np.where(graph.op_phase == Phase.BACKWARD, 2 * whole, whole)
    return np.where(whole > 0, whole, np.isin(family, _PRODUCTS)).astype(np.float64)


def fused_s(
    op_s: FloatArray, bare_s: FloatArray, words: NDArray[np.bool_], products: FloatArray,
    launch_s: float,
) -> FloatArray:  # fmt: skip
    """Op times with those of recurrent layers replaced; ``bare_s`` are those without launches."""
    product_s = np.maximum(bare_s, products * WORD_KERNELS * launch_s)
    return np.where(words, np.where(products > 0, product_s, 0.0), op_s)


def fused_host_s(
    host_s: FloatArray, words: NDArray[np.bool_], products: FloatArray, op_phase: NDArray[np.int8]
) -> FloatArray:
    """The host's times with those of recurrent layers replaced."""
    return np.where(words, products * np.array([*WORD_HOST_S, 0.0])[op_phase], host_s)


def as_tf32(kind: DeviceKind) -> DeviceKind:
    """The kind with the rate that cuDNN's recurrent layers have in 32 bits."""
    rate = kind.peak_flops.get("tf32")
    return kind if rate is None else replace(kind, peak_flops={**kind.peak_flops, "float32": rate})


def _num_words(signature: str) -> int:
    """Of an op that is a whole layer, or all of a net's: words times layers and directions."""
    if not signature.startswith((_WHOLE_LAYER, _WHOLE_NET)):
        return 0
    # The input, and after flat weights the states: one per layer and direction, and sample.
    shapes = [shape for shape in tensor_shapes(signature) if len(shape) == 3]
    if not shapes:
        return 0
    given = shapes[0]
    if signature.startswith(_WHOLE_LAYER) or len(shapes) == 1:
        return given[0]
    layers, samples, _ = shapes[1]
    return layers * (given[0] if given[1] == samples else given[1])
