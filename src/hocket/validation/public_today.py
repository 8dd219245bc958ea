"""Readers of public files about the programs of today: FSDP and torchtitan."""

from __future__ import annotations

from dataclasses import replace

from hocket.cost.parallel.options import with_options
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.softwares import find_software
from hocket.transformer import Division
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
    options = ["async-tp"] if "AsyncTP" in techniques else []
    if "float8" in techniques:
        options.append(f"float8={'rowwise' if 'rowwise' in techniques else 'tensorwise'}")
    return with_options(software, options)


def titan(record: Record) -> list[Measured]:
    """16-bit runs."""
    return [] if "float8" in record["techniques"] else [_titan(record)]


def titan_float8(record: Record) -> list[Measured]:
    """8-bit runs."""
    return [_titan(record)] if "float8" in record["techniques"] else []
