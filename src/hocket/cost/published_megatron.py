"""Readers of Megatron's public files: DGX of 2020, H100, Megatron-Bridge's performance summary.

The summary states degrees and batches. Token dispatch to experts, recomputation and CUDA graphs are
stated in the recipes of the same release (``scripts/performance/configs`` in v0.1 to v0.4,
``src/megatron/bridge/perf_recipes`` later) and taken from there.
"""

from __future__ import annotations

from dataclasses import replace

from hocket.cost.parallel.software import Software
from hocket.cost.parallel.softwares import find_software
from hocket.cost.published_tables import Measured, Record, config_of, gpt_of
from hocket.transformer import Experts, ParallelConfig, Transformer
from hocket.transformer.counts import step_flops
from hocket.transformer.files import find_model, model_from_dict

# ── H100 ─────────────────────────────────────────────────────────────────────────────────────────


def h100_weak_scaling(record: Record) -> list[Measured]:
    """Read rows; microbatches and chunks are not stated.

    Assumed: one sequence per microbatch and at least four chunks in pipelines; without a pipeline
    all sequences of a replica at once, because accumulation would gain nothing.
    """
    replica = int(record["global_batch"]) // int(record["dp"])
    microbatch = replica if record["pp"] == "1" else 1
    common = {**record, "seq": "4096", "vocab": "131072", "microbatch": str(microbatch)}
    model = gpt_of(common, dropout=False)
    config = config_of(common, recompute="none", zero=1)
    chunks = _least_chunks(model.layers // config.pipeline) if config.pipeline > 1 else 1
    config = replace(
        config,
        sequence_parallel=config.tensor > 1,
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
    )
    flops = step_flops(model, config.global_batch, "model")
    return [
        Measured(
            table="",
            row=record["model"],
            model=model,
            config=config,
            cluster="eos",
            software=find_software("megatron-core-2024"),
            step_s=flops / (float(record["tflops_per_gpu"]) * 1e12 * config.num_devices),
        )
    ]


def _least_chunks(layers_per_stage: int) -> int:
    divisors = (n for n in range(4, layers_per_stage + 1) if layers_per_stage % n == 0)
    return next(divisors, 1)


def h100_strong_scaling(record: Record) -> list[Measured]:
    """Read rows; 8 x 6 is stated for 2304 GPUs and assumed for all; chunks as in weak scaling."""
    num_devices = int(record["n_gpus"])
    common = {
        "model": f"177B on {num_devices}", "heads": "96", "hidden": "12288", "layers": "96",
        "tp": "8", "pp": "6", "dp": str(num_devices // 48), "global_batch": "1152",
        "tflops_per_gpu": record["tflops_per_gpu_digitised"],
    }  # fmt: skip
    return h100_weak_scaling(common)


_NEMO_SHAPES = {
    "GPT3-5B": {"hidden": 4096, "layers": 24, "heads": 32, "vocabulary": 51200},
    "GPT3-20B": {"hidden": 6144, "layers": 44, "heads": 48, "vocabulary": 51200},
    "GPT3-175B": {"hidden": 12288, "layers": 96, "heads": 96, "vocabulary": 51200},
    "LLAMA2-7B": {"hidden": 4096, "layers": 32, "heads": 32, "mlp_width": 11008},
    "LLAMA2-13B": {"hidden": 5120, "layers": 40, "heads": 40, "mlp_width": 13824},
    "LLAMA2-70B": {"hidden": 8192, "layers": 80, "heads": 64, "mlp_width": 28672, "kv_heads": 8},
}
"""Shapes of the models that can be derived; the file names none for the others."""
_LLAMA = {
    "mlp": "swiglu", "vocabulary": 32000, "tied_embeddings": False, "learned_positions": False,
    "biases": False,
}  # fmt: skip


def nemo_float8(record: Record) -> list[Measured]:
    """Read NeMo 24.07 runs with 8-bit products, for models of known shape."""
    name = record["model"]
    if name not in _NEMO_SHAPES and name not in ("LLAMA3-8B", "LLAMA3-70B"):
        return []
    if name in _NEMO_SHAPES:
        family = _LLAMA if name.startswith("LLAMA") else {}
        shape = {"sequence": 1, "dropout": False, **family, **_NEMO_SHAPES[name]}
        model = model_from_dict(shape, name.lower())
    else:
        model = find_model(name.lower())
    model = replace(model, sequence=int(record["seq"]))
    degrees = {key: int(record[key]) for key in ("tp", "pp", "cp", "vp", "mbs", "gbs")}
    num_devices = int(record["n_gpus"])
    config = ParallelConfig(
        tensor=degrees["tp"],
        pipeline=degrees["pp"],
        context=degrees["cp"],
        data=num_devices // (degrees["tp"] * degrees["pp"] * degrees["cp"]),
        chunks=degrees["vp"],
        microbatch=degrees["mbs"],
        global_batch=degrees["gbs"],
        schedule="interleaved" if degrees["vp"] > 1 else "1f1b",
        zero=1,
        sequence_parallel=degrees["tp"] > 1,
    )
    rate = float(record["tokens_per_s_per_gpu"]) * num_devices
    return [
        Measured(
            table="",
            row=f"{name} on {num_devices}",
            model=model,
            config=config,
            cluster="eos",
            software=replace(find_software("megatron-core-2024"), dtype="float8"),
            step_s=config.global_batch * model.sequence / rate,
        )
    ]


# ── DGX of 2020 ──────────────────────────────────────────────────────────────────────────────────


def _dgx_2020(record: Record) -> list[Measured]:
    """Read a row; 1024 tokens per sequence and one microbatch reproduce its TFLOP/s."""
    is_volta = "V100" in record["system"]
    common = {
        **record, "seq": "1024", "vocab": "51200", "pp": "1",
        "microbatch": str(int(record["global_batch"]) // int(record["dp"])),
    }  # fmt: skip
    return [
        Measured(
            table="",
            row=f"{record['model']} on {record['n_gpus']} {'V100' if is_volta else 'A100'}",
            model=gpt_of(common),
            config=config_of(common, recompute="full"),
            cluster="dgx2" if is_volta else "dgx-a100-2020",
            software=find_software("megatron-2021"),
            step_s=float(record["iter_time_ms"]) / 1e3,
        )
    ]


def dgx_a100_2020(record: Record) -> list[Measured]:
    """Read the runs on DGX A100."""
    return [row for row in _dgx_2020(record) if row.cluster == "dgx-a100-2020"]


def dgx2_2020(record: Record) -> list[Measured]:
    """Read the runs on DGX-2."""
    return [row for row in _dgx_2020(record) if row.cluster == "dgx2"]


_QWEN3_30B = find_model("qwen3-30b-a3b")
_QWEN3_235B = replace(
    _QWEN3_30B,
    name="qwen3-235b-a22b", hidden=4096, layers=94, heads=64, kv_heads=4, mlp_width=12288,
    experts=Experts(count=128, active=8, mlp_width=1536), source="its config.json",
)  # fmt: skip
_GPT_OSS_120B = replace(
    _QWEN3_30B,
    name="gpt-oss-120b", hidden=2880, layers=36, heads=64, kv_heads=8, head_width=64,
    mlp_width=2880, vocabulary=201088, experts=Experts(count=128, active=4, mlp_width=2880),
    source="its config.json",
)  # fmt: skip
_MODELS = {
    "LLAMA3_8B": find_model("llama3-8b"),
    "LLAMA3_70B": find_model("llama3-70b"),
    "LLAMA3.1_405B": find_model("llama3-405b"),
    "Qwen3_30B_a3B": _QWEN3_30B,
    "Qwen3_235B_a22B": _QWEN3_235B,
    "GPT OSS 120B": _GPT_OSS_120B,
}
"""Models with standard attention and known shape; others (latent attention, state space) are
skipped."""
_SITES = {
    "DGX-H100": "bridge",
    "DGX-B200": "bridge-b200",
    "DGX-B300": "bridge-b300",
    "DGX-GB200": "bridge-gb200",
    "DGX-GB300": "bridge-gb300",
}
_FOUR_BITS = "NVFP4"
"""Rows with 4-bit arithmetic are skipped: it is not modelled."""


def bridge_dense(record: Record) -> list[Measured]:
    """Read H100 runs of dense models."""
    return _rows(record, is_hopper=True, has_experts=False)


def bridge_experts(record: Record) -> list[Measured]:
    """Read H100 runs of mixture-of-experts models."""
    return _rows(record, is_hopper=True, has_experts=True)


def blackwell_dense(record: Record) -> list[Measured]:
    """Read runs of dense models on B200, B300, GB200 and GB300."""
    return _rows(record, is_hopper=False, has_experts=False)


def blackwell_experts(record: Record) -> list[Measured]:
    """Read runs of mixture-of-experts models on B200, B300, GB200 and GB300."""
    return _rows(record, is_hopper=False, has_experts=True)


def _rows(record: Record, *, is_hopper: bool, has_experts: bool) -> list[Measured]:
    model = _MODELS.get(record["model"].partition(" (")[0].strip())
    is_wanted = (
        model is not None
        and record["task"] == "Pre-Training"
        and (record["system"] == "DGX-H100") == is_hopper
        and (model.experts is not None) == has_experts
        and record["precision"] != _FOUR_BITS
    )
    return [_measured(record, model)] if is_wanted and model is not None else []


def _measured(record: Record, shape: Transformer) -> Measured:
    model = replace(shape, sequence=int(record["seq"]))
    config = _ran(record, _config(record, model))
    rate = float(record["tokens_per_s_per_gpu"].partition("(")[0]) * config.num_devices
    site = _SITES[record["system"]]
    return Measured(
        table="",
        row=f"{record['release']} {record['model']} on {config.num_devices}",
        release=record["release"],
        model=model,
        config=config,
        cluster=f"{site}-experts" if model.experts else site,
        software=_software(record, model, config.zero),
        step_s=config.global_batch * model.sequence / rate,
    )


def _config(record: Record, model: Transformer) -> ParallelConfig:
    tensor, pipeline, context = (_degree(record[key]) for key in ("tp", "pp", "cp"))
    chunks = _degree(record["vp"]) if pipeline > 1 else 1
    return ParallelConfig(
        layers=_ends_apart(model.layers, pipeline * chunks),
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        data=int(record["n_gpus"]) // (tensor * pipeline * context),
        expert=_degree(record["ep"]) if model.experts else 1,
        chunks=chunks,
        microbatch=_degree(record["mbs"]),
        global_batch=int(record["gbs"]),
        schedule="interleaved" if chunks > 1 else "1f1b",
        recompute="selective" if model.name == _GPT_OSS_120B.name else "none",
        zero=3 if record["fsdp"] not in ("", "0") else 1,
        sequence_parallel=tensor > 1,
    )


def _ends_apart(layers: int, num_stages: int) -> tuple[int, ...] | None:
    """One layer per stage, with embedding and output layer on stages of their own."""
    return (0, *[1] * layers, 0) if num_stages == layers + 2 else None


def _ran(record: Record, config: ParallelConfig) -> ParallelConfig:
    """Configuration that was run where the summary contradicts the recipes of its own release.

    The recipes hold, which the rates of neighbouring rows confirm: for Qwen3 30B on H100 the
    summary repeats the degrees of 26.02, for Llama-3 70B on GB300 it omits the chunks (v0.3.1), for
    GPT-OSS on H100 it has Blackwell's microbatch (v0.2.0).
    """
    row = (record["release"], record["model"], record["system"], record["precision"])
    if row[:3] == ("26.02.01", "Qwen3_30B_a3B", "DGX-H100"):
        return replace(config, pipeline=1, chunks=1, schedule="1f1b", data=16, expert=16)
    if row == ("26.02.01", "LLAMA3_70B", "DGX-GB300", "MXFP8"):
        return replace(config, chunks=5, schedule="interleaved", microbatch=1)
    if row[:3] == ("25.11", "GPT OSS 120B", "DGX-H100"):
        return replace(config, microbatch=1)
    return config


_IN_HOST = {
    ("LLAMA3_70B", "DGX-B200"): (0, 5),
    ("LLAMA3_70B", "DGX-GB200"): (20, 40),
    ("LLAMA3_70B", "DGX-GB300"): (30, 20),
    ("LLAMA3.1_405B", "DGX-GB200"): (0, 92),
    ("LLAMA3.1_405B", "DGX-GB300"): (40, 10),
}
"""``cpu_offloading_num_layers`` of the recipes with fully sharded weights, in 16 and in 8 bits."""


def _host_share(record: Record, model: Transformer, zero: int) -> float:
    """Fraction of a model's layers whose activations are offloaded to host memory."""
    wide, narrow = _IN_HOST.get((record["model"], record["system"]), (0, 0))
    return (wide if record["precision"] == "BF16" else narrow) / model.layers * (zero == 3)


def _software(record: Record, model: Transformer, zero: int) -> Software:
    # Its recipes sum and reduce gradients in 16 bits (``grad_reduce_in_fp32`` is off).
    software = replace(
        find_software("megatron-core"),
        gradient_bytes=2,
        selective="activations",
        host_share=_host_share(record, model, zero),
    )
    if "tokendrop" in record["model"]:
        software = replace(software, routing_host_s=0.8e-3)
    # The release of 25.09 states 8 bits for the whole table.
    if record["precision"] != "BF16":
        software = replace(software, dtype="float8")
    is_hopper = record["system"] == "DGX-H100"
    return replace(
        software,
        replays_graphs=not is_hopper and _replays(record, model),
        sends_once=not is_hopper or model.name == _QWEN3_30B.name,
        overlaps_experts=is_hopper and _overlaps(record, model),
    )


def _overlaps(record: Record, model: Transformer) -> bool:
    """True if expert communication overlaps: H100 recipes for 235B and the first ones for 30B."""
    is_early = record["release"] in ("25.11", "26.02")
    return model.name == _QWEN3_235B.name or (is_early and model.name == _QWEN3_30B.name)


def _replays(record: Record, model: Transformer) -> bool:
    """True if whole steps are replayed as CUDA graphs: models with experts on Grace machines from
    26.06."""
    if model.experts is None:
        return True
    return record["system"].startswith("DGX-GB") and record["release"] >= "26.06"


def _degree(text: str) -> int:
    text = text.partition("(")[0].strip()
    return int(text) if text.isdecimal() and int(text) > 0 else 1
