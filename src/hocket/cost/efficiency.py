"""Roofline model: attained fractions of a device's peak rates, by op family and shape.

An op's time is the largest of: arithmetic at the attainable rate of its family and dtype, memory
traffic at the attainable bandwidth, and the launch floor. Families and dtypes index one small table
of rates, so a graph costs one lookup per op. O(ops), numpy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, prod
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray
from hocket.base.errors import InputFileError
from hocket.cost.chips import chip_of, num_multiprocessors
from hocket.cost.families import FAMILIES, MATRIX_FAMILIES, family_index, refine
from hocket.cost.host import HostOverhead
from hocket.cost.matrix_kernels import HALF, attention_rates, matrix_losses, power_limit
from hocket.cost.rates import RATES
from hocket.cost.streams import streamed
from hocket.graph.graph import DTYPES, Graph
from hocket.graph.signatures import tensor_shapes
from hocket.hardware.cluster import DeviceKind

# What shapes make of work on an accelerator: tiles that few channels leave empty, and copies.
#
# A convolution is a matrix product of pixels and kernels (implicit GEMM; Chetlur et al. 2014),
# whose result is computed in tiles: NVIDIA's guide for convolutional layers asks for channels that
# 64 divide. Fewer channels take the time of a whole tile. Groups that share a tile are computed as
# one, most of it zeros. Kernels of matrix units read channels last: tensors with channels first, as
# models have them, are copied there and back. Norms over batches reduce each channel by one block
# of threads, so that few channels leave most of a device idle, in 16 bits as in 32.
# `benchmarks/cost/predict_small.py` measures all of it. O(length of a signature), each once.

TILE_COLUMNS, TILE_DEPTH = 64, 32
"""Tile size of convolution kernels: output channels, and summed channels."""
CONVOLUTION = 1.5
"""Slowdown of tiles that channels fill only partly, relative to the usual fraction of the peak."""
POINT_COPIED = 2.0
"""Like `COPIED`, for 1x1 float32 convolutions, which some kernels read without a copy."""
DEPTH_ELEMENT, DEPTH_TAP = 1333.0, 73.0
"""Cost of a depthwise convolution in operations at the usual rate: per element, and per element and
window position. Vector units compute it. H200: 6 ps and 0.33 ps in both dtypes."""
DEPTH_BACKWARD, DEPTH_WIDE_BACKWARD = 666.0, 1243.0
"""Cost of both gradients per window position, for windows up to 5 x 5 and above."""
DEPTH_WIDE_HALF = (43.0, 57.0)
"""Factors, forward and backward, for 16-bit windows above 5 x 5, which use matrix units."""
NATIVE_WINDOW = 25
FLOAT32_NORM = 0.68
"""Time of cuDNN's float32 batch norm over PyTorch's own kernel, which serves 16 bits."""
NORM_PASSES = 2.3
"""Bytes that norms move over the bytes that they touch: one pass for statistics, one to apply them.

Layer, group and batch norms attain a quarter to a third of the bandwidth.
"""
IMAGE_CHANNELS, IMAGE_DEPTH = 4, 16
"""Most channels of an image, and the tile depth of the kernels for such inputs, which waste less.
"""
WEIGHT_GRADIENT = 1.5
"""Time of a weight gradient over the forward pass; it sums over all pixels."""
COPIED = 3.0
"""Bytes that a convolution with two layout copies moves over the bytes that it reads and writes."""
KERNELS, BACKWARD_KERNELS = 4.0, 10.0
"""Kernels that a convolution launches one after the other, layout copies included."""
FULL_CHANNELS, MOST_IDLE = 256, 8.0
"""Channels whose thread blocks fill a device, and the largest slowdown of a norm over few channels:
a single block gets more memory bandwidth than one among many."""
_NORM_BYTES = 4
"""Bytes per element; such norms are no faster in 16 bits."""
_CONVOLUTION = re.compile(r"^aten\.convolution(_backward)?(?:\.\w+)?\(")
_NORM = re.compile(
    r"^aten\.(?:native|cudnn|miopen|_fused)_(batch|group|layer|rms)_norm(?:_backward)?(?:\.\w+)?\("
)
_GROUPS = re.compile(r", ([0-9]{1,15})(?:, \[(?:True|False), (?:True|False), (?:True|False)\])?\)$")
_WANTED = re.compile(r", \[(True|False), (True|False), (?:True|False)\]\)$")


class ShapedWork(NamedTuple):
    """Shape corrections of many ops, one entry each."""

    flops: FloatArray
    bytes: FloatArray
    kernels: FloatArray
    fill: FloatArray


class Shaped(NamedTuple):
    """Shape corrections of an op on an accelerator, relative to its plain FLOPs and bytes."""

    flops: float = 1.0
    bytes: float = 1.0
    kernels: float = 1.0
    """Number of kernels launched one after the other."""
    fill: float = 1.0
    """Largest fraction of a device that its thread blocks occupy."""


def shaped_work(signature: IntArray, signatures: Sequence[str]) -> ShapedWork:
    """Shape corrections of many ops; ``signature`` indexes ``signatures``, -1 if unknown."""
    # One more entry than signatures: -1 (unknown) selects the last, which corrects nothing.
    found = np.array([*map(shaped, signatures), Shaped()], dtype=np.float64)
    return ShapedWork(*found[signature].T)


@lru_cache(maxsize=65536)
def shaped(signature: str) -> Shaped:
    """Shape corrections of one op; 1 if its kind or shapes are unknown."""
    norm = _NORM.match(signature)
    if norm is not None:
        if norm[1] != "batch":
            return Shaped(1.0, NORM_PASSES)
        idle = _idle(signature)
        width = _NORM_BYTES / 2 if _is_half(signature) else FLOAT32_NORM
        return Shaped(1.0, NORM_PASSES * idle * width, fill=1.0 / idle)
    match = _CONVOLUTION.match(signature)
    groups = _GROUPS.search(signature)
    if match is None or groups is None:
        return Shaped(1.0, *streamed(signature))
    shapes = tensor_shapes(signature)[1 if match[1] else 0 :]
    if len(shapes) < 2 or len(shapes[0]) < 3 or len(shapes[1]) != len(shapes[0]):
        return Shaped()
    after, before = shapes[1][:2]
    window = prod(shapes[1][2:])
    num_groups = int(groups[1])
    if not (after and before and window and num_groups):
        return Shaped()
    if num_groups == after and num_groups > 1:
        flops = _depthwise(window, bool(match[1]), _is_half(signature))
        return Shaped(flops, 1.0, BACKWARD_KERNELS if match[1] else KERNELS)
    flops = _waste(after // num_groups or 1, before, num_groups)
    if match[1]:
        flops = _backward_waste(signature, after, before, num_groups, flops)
    if _is_half(signature) and before <= IMAGE_CHANNELS:
        flops *= 2  # their kernels are no faster in 16 bits
    if min(after, before) < TILE_COLUMNS:
        flops *= CONVOLUTION
    # Strides in the signature differ from the default: most likely channels last, without copies.
    if "]{" in signature:
        return Shaped(flops)
    copied = COPIED if window > 1 or _is_half(signature) else POINT_COPIED
    return Shaped(flops, copied, BACKWARD_KERNELS if match[1] else KERNELS)


def _depthwise(window: int, is_backward: bool, is_half: bool) -> float:
    """Cost factor of a depthwise convolution."""
    if is_half and window > NATIVE_WINDOW:
        return DEPTH_WIDE_HALF[is_backward]
    per_tap = DEPTH_WIDE_BACKWARD if window > NATIVE_WINDOW else DEPTH_BACKWARD
    # Two operations per pixel of a window forward, four for both gradients.
    found = per_tap / 4 if is_backward else (DEPTH_ELEMENT + DEPTH_TAP * window) / (2 * window)
    return 2 * found if is_half else found


def _waste(columns: int, depth: int, groups: int) -> float:
    """Cost factor of partly filled tiles in a product with these columns and depth per group."""
    if groups > 1:
        return max(1.0, TILE_COLUMNS / columns)
    tile = IMAGE_DEPTH if depth <= IMAGE_CHANNELS else TILE_DEPTH
    return _padded(columns, TILE_COLUMNS) * _padded(depth, tile)


def _backward_waste(signature: str, after: int, before: int, groups: int, own: float) -> float:
    """Mean cost factor of the gradients that are requested."""
    wanted = _WANTED.search(signature)
    inputs, weights = (flag == "True" for flag in (wanted.groups() if wanted else ("True",) * 2))
    parts = [own if groups > 1 else _waste(before, after, 1)] * inputs
    if groups == 1:
        tile = IMAGE_DEPTH if before <= IMAGE_CHANNELS else TILE_COLUMNS
        own = _padded(after, TILE_COLUMNS) * _padded(before, tile)
    parts += [WEIGHT_GRADIENT * own] * weights
    return sum(parts) / len(parts) if parts else 1.0


def _padded(number: int, tile: int) -> float:
    return ceil(number / tile) * tile / number


def _idle(signature: str) -> float:
    """Slowdown of a batch norm with few channels."""
    shapes = tensor_shapes(signature)
    if not shapes or len(shapes[0]) < 2 or not shapes[0][1]:
        return 1.0
    return min(MOST_IDLE, max(1.0, FULL_CHANNELS / shapes[0][1]))


def _is_half(signature: str) -> bool:
    return "(bfloat16[" in signature or "(float16[" in signature


@dataclass(frozen=True)
class Efficiency:
    """Attained fractions of the peak arithmetic rate and of the memory bandwidth."""

    compute: float
    memory: float


DEFAULT_EFFICIENCY: Mapping[str, Efficiency] = MappingProxyType(
    {family: Efficiency(**shares) for family, shares in RATES["efficiency"].items()}
)
"""Efficiencies without calibration; `docs/concepts/costs.md` has the table with reasons."""

FLOAT32_SHARE = 0.82
"""Fraction of an accelerator's float32 peak attained by large products."""
_PEAK_FALLBACKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "float32": ("float32", "float64"),
        "float64": ("float64", "float32"),
        # A device without bfloat16 units widens to float32, not to float16: the ranges differ.
        "bfloat16": ("bfloat16", "float32"),
        "float16": ("float16", "float32"),
        "float8": ("float8", "bfloat16", "float16", "float32"),
        "int8": ("int8", "float16", "float32"),
        "other": ("float32", "float64"),
    }
)
"""Peaks used for a dtype that a datasheet does not state, best first."""


@dataclass(frozen=True)
class KindFit:
    """Measured figures of one device type, in place of its datasheet's."""

    efficiency: Mapping[str, Efficiency] = field(default_factory=dict)
    """Attained efficiency by ``family`` or ``family/dtype``; the longer key wins."""
    launch_s: float | None = None
    """Launch floor; None: from the datasheet."""
    host: HostOverhead = field(default_factory=HostOverhead)
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    """Peaks that the efficiencies refer to; empty: those of the datasheet."""
    memory_bandwidth_bps: float | None = None
    """Bandwidth that the efficiencies refer to; None: that of the datasheet."""

    def figures(self, kind: DeviceKind) -> DeviceKind:
        """The device type with the peak rates that this fit refers to.

        Figures of CPUs are measured anew for each cluster and differ slightly; efficiencies must be
        combined with the figures that they were fitted to.
        """
        return replace(
            kind,
            peak_flops=self.peak_flops or kind.peak_flops,
            memory_bandwidth_bps=self.memory_bandwidth_bps or kind.memory_bandwidth_bps,
            launch_s=kind.launch_s if self.launch_s is None else self.launch_s,
        )

    def of(self, family: str, dtype: str, kind: DeviceKind) -> Efficiency:
        """Efficiency of a family and dtype on a device type."""
        for key in (f"{family}/{dtype}", family):
            if key in self.efficiency:
                return self.efficiency[key]
        return default_efficiency(family, dtype, kind)


def default_efficiency(family: str, dtype: str, kind: DeviceKind) -> Efficiency:
    """Efficiency without a measurement on this machine.

    16-bit matrix units use the chip's fractions, the same as `hocket parallel`.
    """
    usual = DEFAULT_EFFICIENCY[family]
    if kind.is_cpu:
        return usual
    if family in RATES["accelerator_memory"]:
        return replace(usual, memory=RATES["accelerator_memory"][family])
    chip = chip_of(kind.name)
    if family == "matmul":
        return replace(usual, compute=chip.mixed_share if dtype in HALF else FLOAT32_SHARE)
    if family == "convolution" and dtype == "float32":
        return replace(usual, compute=chip.float32_convolution_share)
    if family == "attention" and dtype in HALF:
        return replace(usual, compute=attention_rates(chip).forward)
    return usual


@dataclass(frozen=True, eq=False)
class OpWork:
    """Work of ops on a device, one entry per op."""

    family: IntArray
    """Index into `FAMILIES`."""
    dtype: NDArray[np.int8]
    """Index into `DTYPES`."""
    flops: FloatArray
    bytes_touched: FloatArray
    signature: IntArray
    """Index into ``signatures``; -1 if unknown."""
    signatures: Sequence[str]

    def shaped_on(self, kind: DeviceKind) -> ShapedWork:
        """Shape corrections on a device type.

        CPUs have no tiles. A convolution without matrix units for its dtype reads channels-first
        data without a copy and comes closer to the peak.
        """
        if kind.is_cpu:
            return ShapedWork(*np.ones((len(ShapedWork._fields), len(self.family))))
        convolves = self.family == FAMILIES.index("convolution")
        vector_flops = peak_flops(kind, "elementwise", "float32") if convolves.any() else 0.0
        native = [
            dtype
            for dtype in set(self.dtype[convolves].tolist())
            if peak_flops(kind, "convolution", DTYPES[dtype]) <= vector_flops
        ]
        # A dtype without matrix units runs on vector units, at the same rate as elementwise ops.
        is_native = convolves & np.isin(self.dtype, native)
        chip = chip_of(kind.name)
        flops, touched, kernels, fill = shaped_work(self.signature, self.signatures)
        num_own = num_multiprocessors(kind.name)
        flops = flops * matrix_losses(self.signature, self.signatures, chip, num_own)
        # Fewer channels fill fewer multiprocessors.
        filled = np.minimum(1.0, fill * num_multiprocessors("h200") / num_own)
        touched, fill = touched * fill / filled, filled
        return ShapedWork(
            np.where(is_native & (flops >= CONVOLUTION), flops / CONVOLUTION, flops),
            np.where(is_native, 1.0, touched),
            np.where(is_native, 1.0, kernels),
            fill,
        )


def work_of(graph: Graph) -> OpWork:
    """Work of the ops of a graph."""
    family = refine(family_index(graph.kinds)[graph.op_kind], graph.op_signature, graph.signatures)
    return OpWork(
        family,
        graph.op_dtype,
        graph.flops,
        graph.bytes_touched.astype(np.float64),
        graph.op_signature,
        graph.signatures,
    )


def peak_flops(kind: DeviceKind, family: str, dtype: str) -> float:
    """Datasheet operations per second for a family and dtype.

    Float32 convolutions run in TF32 if the device has it, PyTorch's default; families without
    matrix products run on vector units at the float32 rate.
    """
    names = _PEAK_FALLBACKS[dtype if family in MATRIX_FAMILIES or dtype == "float64" else "float32"]
    if family == "convolution" and dtype == "float32":
        names = ("tf32", *names)
    for name in names:
        if name in kind.peak_flops:
            return kind.peak_flops[name]
    raise InputFileError(
        f"device kind {kind.name!r} states no peak rate that serves {dtype!r}",
        hint=f"add a peak for one of: {', '.join(names)}",
        where=kind.name,
    )


def ideal_s(work: OpWork, kind: DeviceKind) -> tuple[FloatArray, FloatArray]:
    """Seconds of arithmetic and of memory traffic at the datasheet's full rates, with shape
    corrections on accelerators."""
    rate = np.full((len(FAMILIES), len(DTYPES)), np.inf)
    # Only combinations that occur: the datasheet may lack a rate that no op needs.
    for family, dtype in sorted({*zip(work.family.tolist(), work.dtype.tolist(), strict=True)}):
        rate[family, dtype] = peak_flops(kind, FAMILIES[family], DTYPES[dtype])
    shaped = work.shaped_on(kind)
    flops, touched = work.flops * shaped.flops, work.bytes_touched * shaped.bytes
    return flops / rate[work.family, work.dtype], touched / kind.memory_bandwidth_bps


def roofline_s(work: OpWork, kind: DeviceKind, fit: KindFit | None = None) -> FloatArray:
    """Device time per op in seconds; 0 for ops that neither compute nor touch memory."""
    fit = fit or KindFit()
    attained = [[fit.of(family, dtype, kind) for dtype in DTYPES] for family in FAMILIES]
    compute = np.array([[cell.compute for cell in row] for row in attained])
    memory = np.array([[cell.memory for cell in row] for row in attained])
    kind = fit.figures(kind)
    compute_s, memory_s = ideal_s(work, kind)
    index = work.family, work.dtype
    seconds = np.maximum(compute_s / compute[index], memory_s / memory[index])
    seconds = seconds * _power_limits(seconds, work, kind, fit)
    launches = (work.flops > 0) | (work.bytes_touched > 0)
    return np.where(
        launches, np.maximum(seconds, kind.launch_s * work.shaped_on(kind).kernels), 0.0
    )


def _power_limits(seconds: FloatArray, work: OpWork, kind: DeviceKind, fit: KindFit) -> FloatArray:
    """Slowdown of 16-bit products that fill most of a step; 1 for all other ops and for measured
    rates."""
    halves = [DTYPES.index(dtype) for dtype in HALF]
    is_product = (work.family == FAMILIES.index("matmul")) & np.isin(work.dtype, halves)
    measured = {"matmul", *(f"matmul/{dtype}" for dtype in HALF)} & set(fit.efficiency)
    # Measured rates contain the effect of power already.
    if kind.is_cpu or measured or not is_product.any():
        return np.ones(len(seconds))
    product_s = float(seconds[is_product].sum())
    limit = power_limit(product_s, float(seconds.sum()) - product_s, chip_of(kind.name))
    return np.where(is_product, limit, 1.0)
