"""Model, program and machine as the arrays that the formulas read.

Every field is an array: of no dimension if it is the same for all configs, or with one entry per
config if configs of different models or programs are computed at once, as calibration does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import UsageError, did_you_mean
from hocket.cost.chips import chip_of
from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.software import Software
from hocket.hardware.cluster import DeviceKind
from hocket.hardware.network import Network
from hocket.transformer import Experts, Transformer


@dataclass(frozen=True, eq=False, kw_only=True)
class Setting:
    """All sizes, rates and options of model, program and machine that a step's time depends on."""

    hidden: FloatArray
    layers: FloatArray
    heads: FloatArray
    head_width: FloatArray
    """Width of one head in attention; that of values under latent attention."""
    query_width: FloatArray
    """Width of all query heads together; see `AttentionWidths`, also for the next ones."""
    key_width: FloatArray
    value_width: FloatArray
    output_width: FloatArray
    latent_width: FloatArray
    query_rank: FloatArray
    key_rank: FloatArray
    up_width: FloatArray
    mlp_width: FloatArray
    num_wide: FloatArray
    """Matrices from the hidden width to the MLP's width: two in a gated MLP, else one."""
    vocabulary: FloatArray
    sequence: FloatArray
    is_tied: FloatArray
    sparse_share: FloatArray
    """Fraction of the layers that have experts."""
    expert_count: FloatArray
    expert_active: FloatArray
    expert_width: FloatArray
    shared_width: FloatArray
    is_flash: FloatArray
    flash_forward: FloatArray
    """Fraction of the peak that fused attention attains forward; see `AttentionRates`."""
    flash_backward: FloatArray
    flash_forward_half: FloatArray
    flash_backward_half: FloatArray
    flash_width_half: FloatArray
    matrix_share: FloatArray
    """Fraction of the peak that large matrix products attain, in the program's dtype."""
    token_share: FloatArray
    """Fraction of the 16-bit peak that large matrix products attain."""
    matrix_depth: FloatArray
    is_float8: FloatArray
    cast_bytes: FloatArray
    is_eager: FloatArray
    """1 if norms and rotary embeddings of models with a gated MLP are many small kernels."""
    selects_ops: FloatArray
    selects_activations: FloatArray
    casts_weights: FloatArray
    gap_s: FloatArray
    balances_context: FloatArray
    sends_once: FloatArray
    overlaps_experts: FloatArray
    routing_host_s: FloatArray
    replays_graphs: FloatArray
    most_shards: FloatArray
    offloads: FloatArray
    gradient_bytes: FloatArray
    sent_gradient_bytes: FloatArray
    scatters_activations: FloatArray
    overlaps_tensor: FloatArray
    overlaps_data: FloatArray
    overlaps_pipeline: FloatArray
    fuses_accumulation: FloatArray
    gathers_by_tensor: FloatArray
    pause_s: FloatArray
    peak_flops: FloatArray
    token_flops: FloatArray
    """Peak FLOP/s of products between tokens, which stay in 16 bits in 8-bit programs."""
    memory_bps: FloatArray
    devices_per_host: FloatArray
    inside_bps: FloatArray
    inside_latency_s: FloatArray
    between_bps: FloatArray
    between_latency_s: FloatArray
    coefficients: Coefficients = Coefficients()  # noqa: RUF009 - frozen


def setting_of(
    model: Transformer,
    software: Software,
    kind: DeviceKind,
    network: Network,
    coefficients: Coefficients = Coefficients(),  # noqa: B008 - frozen
) -> Setting:
    """Return the setting of one model, program, device type and network."""
    chip = chip_of(kind.name, software.libraries)
    rates = chip.attention["flash" if software.attention == "plain" else software.attention]
    is_float8 = software.dtype == "float8"
    experts = model.experts or Experts(count=1, active=0, mlp_width=0, dense_layers=model.layers)
    # Fields of the same name are copied; the others are derived below.
    values: dict[str, float] = {
        field.name: getattr(source, field.name)
        for source in (model, software, network)
        for field in fields(Setting)
        if hasattr(source, field.name)
    }
    values |= model.attention._asdict()
    values |= {
        "head_width": model.latent.value_width if model.latent else model.head_width,
        "num_wide": 1 if model.mlp == "gelu" else 2,
        "is_tied": model.tied_embeddings,
        "sparse_share": 1 - experts.dense_layers / model.layers,
        "expert_count": experts.count,
        "expert_active": experts.active,
        "expert_width": experts.mlp_width,
        "shared_width": experts.shared_width,
        "is_flash": software.attention != "plain",
        "flash_forward": rates.forward,
        "flash_backward": rates.backward,
        "flash_forward_half": rates.forward_half,
        "flash_backward_half": rates.backward_half,
        "flash_width_half": rates.width_half,
        "matrix_share": chip.float8_share * software.float8_rate
        if is_float8
        else chip.matrix_share,
        "token_share": chip.matrix_share,
        "matrix_depth": chip.matrix_depth,
        "is_float8": is_float8,
        "is_eager": software.is_eager and model.mlp == "swiglu",
        "selects_ops": software.selective == "ops",
        "selects_activations": software.selective == "activations",
        "peak_flops": _peak_flops(kind, software.dtype),
        # Products between tokens stay in 16 bits in 8-bit programs.
        "token_flops": _peak_flops(kind, "bfloat16" if is_float8 else software.dtype),
        "memory_bps": kind.memory_bandwidth_bps,
    }
    columns = {name: np.asarray(value, np.float64) for name, value in values.items()}
    return Setting(**columns, coefficients=coefficients)


def stack_settings(settings: Sequence[Setting]) -> Setting:
    """Stack settings into one whose arrays have an entry for each of them."""
    columns = [field.name for field in fields(Setting) if field.name != "coefficients"]
    stacked = {name: np.array([getattr(each, name) for each in settings]) for name in columns}
    return Setting(**stacked, coefficients=settings[0].coefficients)


def _peak_flops(kind: DeviceKind, dtype: str) -> float:
    if dtype not in kind.peak_flops:
        raise UsageError(
            f"{kind.name!r} has no rate for {dtype!r}", hint=did_you_mean(dtype, kind.peak_flops)
        )
    return kind.peak_flops[dtype]
