"""Readers of public files about the programs of today: FSDP, torchtitan, Megatron-Bridge."""

from __future__ import annotations

from dataclasses import replace

from hocket.cost.parallel.software import Software
from hocket.cost.parallel.softwares import find_software
from hocket.transformer import Division, Experts, Transformer
from hocket.transformer.files import find_model
from hocket.validation.records import Record
from hocket.validation.rows import Measured
from hocket.validation.tables import gpt

_GIB = 2**30

# ── llm-foundry ──────────────────────────────────────────────────────────────────────────────────

_MPT = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16),
    "3b": (2560, 32, 20), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}  # fmt: skip
"""Width, layers and heads: with these the stated numbers of parameters come out."""
_MPT_SITES = {
    "h100_80gb": "mosaic-h100", "a100_80gb": "mosaic-a100-80g", "a100_40gb": "mosaic-a100-40g",
}  # fmt: skip


def _llm_foundry(record: Record) -> Measured:
    hidden, layers, heads = _MPT[record["model"]]
    model = gpt(
        hidden=hidden, layers=layers, heads=heads, sequence=int(record["seq"]), vocabulary=50368,
        dropout=False,
    )  # fmt: skip
    division = Division(
        data=int(record["n_gpus"]),
        microbatch=int(record["microbatch"]),
        global_batch=int(record["global_batch"]),
        recompute="full" if record["activation_ckpt"] == "True" else "none",
        zero=3 if record["sharding"] == "FULL_SHARD" else 2,
    )
    software = find_software("fsdp")
    if record["mp_mode"] == "PURE":
        software = replace(
            software, gradient_bytes=2, optimizer_bytes=12, copies_gradients=False, logit_bytes=4
        )
    if record["precision"] == "amp_fp8":
        software = replace(software, dtype="float8")
    return Measured(
        table="",
        row=f"{record['model']} {record['seq']} on {record['n_gpus']}",
        model=model,
        division=division,
        cluster=_MPT_SITES[record["gpu"]],
        software=software,
        step_s=division.global_batch * model.sequence / float(record["tokens_per_s"]),
    )


def fsdp_h100(record: Record) -> list[Measured]:
    """16-bit runs on H100."""
    is_own = record["gpu"] == "h100_80gb" and record["precision"] != "amp_fp8"
    return [_llm_foundry(record)] if is_own else []


def fsdp_h100_float8(record: Record) -> list[Measured]:
    """8-bit runs on H100."""
    is_own = record["gpu"] == "h100_80gb" and record["precision"] == "amp_fp8"
    return [_llm_foundry(record)] if is_own else []


def fsdp_a100_80g(record: Record) -> list[Measured]:
    """Runs on A100 with 80 GB."""
    return [_llm_foundry(record)] if record["gpu"] == "a100_80gb" else []


def fsdp_a100_40g(record: Record) -> list[Measured]:
    """Runs on A100 with 40 GB."""
    return [_llm_foundry(record)] if record["gpu"] == "a100_40gb" else []


# ── torchtitan ───────────────────────────────────────────────────────────────────────────────────


def _titan(record: Record) -> Measured:
    """Microbatches of pipelines are not stated: torchtitan makes as many as there are stages."""
    name = record["model"].lower().replace("llama3.1", "llama3").removesuffix(" h200")
    model = replace(find_model(name), sequence=int(record["seq"]))
    pipeline, context = int(record["pp"]), int(record["cp"])
    local, data = int(record["local_batch"]), int(record["fsdp"])
    chunks = 2 if "nterleaved" in record["schedule"] else 1
    num_microbatches = pipeline * chunks if pipeline > 1 else 1
    division = Division(
        tensor=int(record["tp"]),
        pipeline=pipeline,
        data=data,
        context=context,
        chunks=chunks,
        microbatch=max(1, local // num_microbatches),
        global_batch=local * data,
        schedule="interleaved" if chunks > 1 else "1f1b",
        recompute="full" if record["activation_ckpt"] == "full" else "selective",
        # With a pipeline, gathered weights and summed gradients stay until the end of the step.
        zero=(1 if pipeline > 1 else 3) if data * context > 1 else 0,
        sequence_parallel=int(record["tp"]) > 1,
    )
    rate = float(record["tokens_per_s_per_gpu"]) * division.num_devices
    memory = record["memory_gib"]
    return Measured(
        table="",
        row=f"{record['model']} on {record['n_gpus']}, {record['techniques']}",
        model=model,
        division=division,
        cluster="titan-h200" if "H200" in record["model"] else "titan-h100",
        software=_titan_software(record["techniques"]),
        step_s=division.global_batch * model.sequence / rate,
        memory_bytes=float(memory) * _GIB if memory else None,
    )


def _titan_software(techniques: str) -> Software:
    software = find_software("torchtitan" if "compile" in techniques else "torchtitan-eager")
    if "AsyncTP" in techniques:
        software = replace(software, overlaps_tensor=True)
    if "float8" not in techniques:
        return software
    software = replace(software, dtype="float8")
    # A scale per row takes another pass for each of the two uses of a tensor, and slower products.
    return (
        replace(software, cast_bytes=16.0, float8_rate=0.65)
        if "rowwise" in techniques
        else software
    )


def titan(record: Record) -> list[Measured]:
    """16-bit runs."""
    return [] if "float8" in record["techniques"] else [_titan(record)]


def titan_float8(record: Record) -> list[Measured]:
    """8-bit runs."""
    return [_titan(record)] if "float8" in record["techniques"] else []


# ── Megatron-Bridge ──────────────────────────────────────────────────────────────────────────────

_QWEN3_235B = replace(
    find_model("qwen3-30b-a3b"),
    name="qwen3-235b-a22b", hidden=4096, layers=94, heads=64, kv_heads=4, mlp_width=12288,
    experts=Experts(count=128, active=8, mlp_width=1536), source="its config.json",
)  # fmt: skip
_GPT_OSS_120B = replace(
    find_model("qwen3-30b-a3b"),
    name="gpt-oss-120b", hidden=2880, layers=36, heads=64, kv_heads=8, head_width=64,
    mlp_width=2880, vocabulary=201088, experts=Experts(count=128, active=4, mlp_width=2880),
    source="its config.json",
)  # fmt: skip
_BRIDGE_MODELS = {
    "LLAMA3_8B": "llama3-8b", "LLAMA3_70B": "llama3-70b", "LLAMA3.1_405B": "llama3-405b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
}  # fmt: skip
_BRIDGE_SHAPES = {"Qwen3_235B_a22B": _QWEN3_235B, "GPT OSS 120B": _GPT_OSS_120B}
"""Of the others the attention is of another kind (latent, state space), or the shape is unknown."""


def _bridge_model(name: str) -> Transformer | None:
    plain = name.partition(" (")[0].strip()
    if plain in _BRIDGE_SHAPES:
        return _BRIDGE_SHAPES[plain]
    return find_model(_BRIDGE_MODELS[plain]) if plain in _BRIDGE_MODELS else None


def _degree(text: str) -> int:
    text = text.partition("(")[0].strip()
    return int(text) if text.isdecimal() and int(text) > 0 else 1


def _bridge(record: Record) -> Measured | None:
    model = _bridge_model(record["model"])
    if model is None or record["task"] != "Pre-Training" or record["system"] != "DGX-H100":
        return None
    model = replace(model, sequence=int(record["seq"]))
    tensor, pipeline, context = (_degree(record[key]) for key in ("tp", "pp", "cp"))
    num_devices, chunks = int(record["n_gpus"]), _degree(record["vp"])
    division = Division(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        data=num_devices // (tensor * pipeline * context),
        expert=_degree(record["ep"]) if model.experts else 1,
        chunks=chunks,
        microbatch=_degree(record["mbs"]),
        global_batch=int(record["gbs"]),
        schedule="interleaved" if chunks > 1 else "1f1b",
        zero=3 if record["fsdp"] not in ("", "0") else 1,
        sequence_parallel=tensor > 1,
    )
    rate = float(record["tokens_per_s_per_gpu"].partition("(")[0]) * num_devices
    # Its recipes reduce in 16 bits what they sum in 32.
    software = replace(find_software("megatron-core"), reduce_bytes=2)
    # The release of 25.09 states 8 bits for the whole table.
    is_float8 = record["precision"] != "BF16"
    return Measured(
        table="",
        row=f"{record['release']} {record['model']} on {num_devices}",
        model=model,
        division=division,
        cluster="bridge-experts" if model.experts else "bridge",
        software=replace(software, dtype="float8") if is_float8 else software,
        step_s=division.global_batch * model.sequence / rate,
    )


def bridge_dense(record: Record) -> list[Measured]:
    """Runs on H100 of models without experts."""
    row = _bridge(record)
    return [row] if row is not None and row.model.experts is None else []


def bridge_experts(record: Record) -> list[Measured]:
    """Runs on H100 of mixtures of experts."""
    row = _bridge(record)
    return [row] if row is not None and row.model.experts is not None else []
