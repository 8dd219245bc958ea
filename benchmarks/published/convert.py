"""Convert public files of measured training runs to tables that `hocket validate --data` reads.

    python benchmarks/published/convert.py PUBLIC OUT
    hocket validate --data OUT

Each reader turns a row of one public file into measured runs, with assumptions for what the row
does not say. A file may contain several tables; missing files are skipped. Megatron-Bridge's
summary states degrees and batches; token dispatch to experts, recomputation and CUDA graphs are
taken from the recipes of the same release (``scripts/performance/configs`` in v0.1 to v0.4,
``src/megatron/bridge/perf_recipes`` later).
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hocket.cost.parallel.measured_runs import MeasuredRun
from hocket.cost.parallel.options import with_options
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.softwares import find_software
from hocket.transformer import Experts, ParallelConfig, Transformer
from hocket.transformer.counts import step_flops
from hocket.transformer.files import find_model, model_from_dict, model_to_dict

Record = Mapping[str, str]


def gpt_of(record: Record, *, dropout: bool = True) -> Transformer:
    """Transformer shape of a row."""
    return gpt(
        hidden=int(record["hidden"]),
        layers=int(record["layers"]),
        heads=int(record["heads"]),
        sequence=int(record["seq"]),
        vocabulary=int(record["vocab"]),
        dropout=dropout,
    )


def config_of(record: Record, *, recompute: str, chunks: int = 1, zero: int = 0) -> ParallelConfig:
    """Parallel config of a row."""
    return ParallelConfig(
        tensor=int(record["tp"]),
        pipeline=int(record["pp"]),
        data=int(record["dp"]),
        chunks=chunks,
        microbatch=int(record["microbatch"]),
        global_batch=int(record["global_batch"]),
        schedule="interleaved" if chunks > 1 else "1f1b",
        recompute=recompute,  # type: ignore[arg-type]
        zero=zero,
    )


def gpt(
    *, hidden: int, layers: int, heads: int, sequence: int, vocabulary: int, dropout: bool = True
) -> Transformer:
    """Transformer shape of a GPT as Megatron trains it."""
    return model_from_dict(
        {
            "hidden": hidden, "layers": layers, "heads": heads, "sequence": sequence,
            "vocabulary": vocabulary, "dropout": dropout,
        }
    )  # fmt: skip


# ── H100 ─────────────────────────────────────────────────────────────────────────────────────────


def h100_weak_scaling(record: Record) -> list[MeasuredRun]:
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
        MeasuredRun(
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


def h100_strong_scaling(record: Record) -> list[MeasuredRun]:
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


def nemo_float8(record: Record) -> list[MeasuredRun]:
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
        MeasuredRun(
            row=f"{name} on {num_devices}",
            model=model,
            config=config,
            cluster="eos",
            software=replace(find_software("megatron-core-2024"), dtype="float8"),
            step_s=config.global_batch * model.sequence / rate,
        )
    ]


# ── DGX of 2020 ──────────────────────────────────────────────────────────────────────────────────


def _dgx_2020(record: Record) -> list[MeasuredRun]:
    """Read a row; 1024 tokens per sequence and one microbatch reproduce its TFLOP/s."""
    is_volta = "V100" in record["system"]
    common = {
        **record, "seq": "1024", "vocab": "51200", "pp": "1",
        "microbatch": str(int(record["global_batch"]) // int(record["dp"])),
    }  # fmt: skip
    return [
        MeasuredRun(
            row=f"{record['model']} on {record['n_gpus']} {'V100' if is_volta else 'A100'}",
            model=gpt_of(common),
            config=config_of(common, recompute="full"),
            cluster="dgx2" if is_volta else "dgx-a100-2020",
            software=find_software("megatron-2021"),
            step_s=float(record["iter_time_ms"]) / 1e3,
        )
    ]


def dgx_a100_2020(record: Record) -> list[MeasuredRun]:
    """Read the runs on DGX A100."""
    return [row for row in _dgx_2020(record) if row.cluster == "dgx-a100-2020"]


def dgx2_2020(record: Record) -> list[MeasuredRun]:
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
_DEEPSEEK = find_model("deepseek-v3")
_KIMI = replace(
    _DEEPSEEK,
    name="kimi-k2", heads=64, kv_heads=64, vocabulary=163840,
    experts=Experts(count=384, active=8, mlp_width=2048, shared_width=2048, dense_layers=1),
    source="its config.json",
)  # fmt: skip
_MODELS = {
    "LLAMA3_8B": find_model("llama3-8b"),
    "LLAMA3_70B": find_model("llama3-70b"),
    "LLAMA3.1_405B": find_model("llama3-405b"),
    "Qwen3_30B_a3B": _QWEN3_30B,
    "Qwen3_235B_a22B": _QWEN3_235B,
    "GPT OSS 120B": _GPT_OSS_120B,
    "DeepSeekV3": _DEEPSEEK,
    "Kimi_K2": _KIMI,
}
"""Models of known shape; others (sparse attention, state space) are skipped."""
_SITES = {
    "DGX-H100": "bridge",
    "DGX-B200": "bridge-b200",
    "DGX-B300": "bridge-b300",
    "DGX-GB200": "bridge-gb200",
    "DGX-GB300": "bridge-gb300",
}
_FOUR_BITS = "NVFP4"
"""Rows with 4-bit arithmetic are skipped: it is not modelled."""


def bridge_latent(record: Record) -> list[MeasuredRun]:
    """Read runs of models with multi-head latent attention, on all machines."""
    model = _model_of(record)
    return [_bridge_run(record, model)] if model is not None and model.latent else []


def bridge_dense(record: Record) -> list[MeasuredRun]:
    """Read H100 runs of dense models."""
    return _bridge_rows(record, is_hopper=True, has_experts=False)


def bridge_experts(record: Record) -> list[MeasuredRun]:
    """Read H100 runs of mixture-of-experts models."""
    return _bridge_rows(record, is_hopper=True, has_experts=True)


def blackwell_dense(record: Record) -> list[MeasuredRun]:
    """Read runs of dense models on B200, B300, GB200 and GB300."""
    return _bridge_rows(record, is_hopper=False, has_experts=False)


def blackwell_experts(record: Record) -> list[MeasuredRun]:
    """Read runs of mixture-of-experts models on B200, B300, GB200 and GB300."""
    return _bridge_rows(record, is_hopper=False, has_experts=True)


def _bridge_rows(record: Record, *, is_hopper: bool, has_experts: bool) -> list[MeasuredRun]:
    model = _model_of(record)
    is_wanted = (
        model is not None
        and model.latent is None
        and (record["system"] == "DGX-H100") == is_hopper
        and (model.experts is not None) == has_experts
    )
    return [_bridge_run(record, model)] if is_wanted and model is not None else []


def _model_of(record: Record) -> Transformer | None:
    """Model of a row; None if the row is not described."""
    name, _, variant = record["model"].partition(" (")
    model = _MODELS.get(name.strip())
    if model is None or record["task"] != "Pre-Training" or record["precision"] == _FOUR_BITS:
        return None
    # Multi-token prediction is one more layer; its own logits (2 % of the FLOPs) are left out.
    has_mtp = name == "DeepSeekV3" and "w/o MTP" not in variant
    return replace(model, name="deepseek-v3-mtp", layers=model.layers + 1) if has_mtp else model


def _bridge_run(record: Record, shape: Transformer) -> MeasuredRun:
    model = replace(shape, sequence=int(record["seq"]))
    config = _ran(record, _bridge_config(record, model))
    rate = float(record["tokens_per_s_per_gpu"].partition("(")[0]) * config.num_devices
    site = _SITES[record["system"]]
    return MeasuredRun(
        row=f"{record['release']} {record['model']} on {config.num_devices}",
        release=record["release"],
        model=model,
        config=config,
        cluster=f"{site}-{'latent' if model.latent else 'experts'}" if model.experts else site,
        software=_bridge_software(record, model, config.zero),
        step_s=config.global_batch * model.sequence / rate,
    )


def _bridge_config(record: Record, model: Transformer) -> ParallelConfig:
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


def _bridge_software(record: Record, model: Transformer, zero: int) -> Software:
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


# Readers of public files about the programs of today: FSDP and torchtitan.

_TODAY_GIB = 2**30

# ── llm-foundry ──────────────────────────────────────────────────────────────────────────────────

_MPT = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16),
    "3b": (2560, 32, 20), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}  # fmt: skip
"""Width, layers and heads that give the stated parameter counts."""
_MPT_SITES = {
    "h100_80gb": "mosaic-h100", "a100_80gb": "mosaic-a100-80g", "a100_40gb": "mosaic-a100-40g",
}  # fmt: skip


def _llm_foundry(record: Record) -> MeasuredRun:
    hidden, layers, heads = _MPT[record["model"]]
    model = gpt(
        hidden=hidden, layers=layers, heads=heads, sequence=int(record["seq"]), vocabulary=50368,
        dropout=False,
    )  # fmt: skip
    config = ParallelConfig(
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
    return MeasuredRun(
        row=f"{record['model']} {record['seq']} on {record['n_gpus']}",
        model=model,
        config=config,
        cluster=_MPT_SITES[record["gpu"]],
        software=software,
        step_s=config.global_batch * model.sequence / float(record["tokens_per_s"]),
    )


def fsdp_h100(record: Record) -> list[MeasuredRun]:
    """16-bit runs on H100."""
    is_own = record["gpu"] == "h100_80gb" and record["precision"] != "amp_fp8"
    return [_llm_foundry(record)] if is_own else []


def fsdp_h100_float8(record: Record) -> list[MeasuredRun]:
    """8-bit runs on H100."""
    is_own = record["gpu"] == "h100_80gb" and record["precision"] == "amp_fp8"
    return [_llm_foundry(record)] if is_own else []


def fsdp_a100_80g(record: Record) -> list[MeasuredRun]:
    """Runs on A100 with 80 GB."""
    return [_llm_foundry(record)] if record["gpu"] == "a100_80gb" else []


def fsdp_a100_40g(record: Record) -> list[MeasuredRun]:
    """Runs on A100 with 40 GB."""
    return [_llm_foundry(record)] if record["gpu"] == "a100_40gb" else []


# ── torchtitan ───────────────────────────────────────────────────────────────────────────────────


def _titan(record: Record) -> MeasuredRun:
    """Read a row; torchtitan uses one microbatch per pipeline stage, which the file does not
    state."""
    name = record["model"].lower().replace("llama3.1", "llama3").removesuffix(" h200")
    model = replace(find_model(name), sequence=int(record["seq"]))
    pipeline, context = int(record["pp"]), int(record["cp"])
    local, data = int(record["local_batch"]), int(record["fsdp"])
    chunks = 2 if "nterleaved" in record["schedule"] else 1
    num_microbatches = pipeline * chunks if pipeline > 1 else 1
    config = ParallelConfig(
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
    rate = float(record["tokens_per_s_per_gpu"]) * config.num_devices
    memory = record["memory_gib"]
    return MeasuredRun(
        row=f"{record['model']} on {record['n_gpus']}, {record['techniques']}",
        model=model,
        config=config,
        cluster="titan-h200" if "H200" in record["model"] else "titan-h100",
        software=_titan_software(record["techniques"]),
        step_s=config.global_batch * model.sequence / rate,
        memory_bytes=float(memory) * _TODAY_GIB if memory else None,
    )


def _titan_software(techniques: str) -> Software:
    software = find_software("torchtitan" if "compile" in techniques else "torchtitan-eager")
    options = ["async-tp"] if "AsyncTP" in techniques else []
    if "float8" in techniques:
        options.append(f"float8={'rowwise' if 'rowwise' in techniques else 'tensorwise'}")
    return with_options(software, options)


def titan(record: Record) -> list[MeasuredRun]:
    """16-bit runs."""
    return [] if "float8" in record["techniques"] else [_titan(record)]


def titan_float8(record: Record) -> list[MeasuredRun]:
    """8-bit runs."""
    return [_titan(record)] if "float8" in record["techniques"] else []


_GIB = 2**30
"""Bytes of the unit that nvidia-smi reports."""


# ── Selene ───────────────────────────────────────────────────────────────────────────────────────


def _sc21_table1(record: Record) -> list[MeasuredRun]:
    return [_selene(record, row=record["model"], chunks=int(record["v"]))]


def _sc21_table2(record: Record) -> list[MeasuredRun]:
    if record["scheme"] != "PTD-P":
        return []
    # Its throughputs fall with the number of microbatches as they do without interleaving.
    return [_selene(record, row=f"{record['params_billion']}B on {record['n_gpus']}")]


def _sc21_zero3(record: Record) -> list[MeasuredRun]:
    if record["scheme"] != "ZeRO-3":
        return []
    row = _selene(record, row=f"{record['params_billion']}B on {record['n_gpus']}")
    return [
        replace(row, config=replace(row.config, zero=3), software=find_software("deepspeed-zero3"))
    ]


def _selene(record: Record, row: str, chunks: int = 1) -> MeasuredRun:
    return MeasuredRun(
        row=row,
        model=gpt_of(record),
        config=config_of(record, chunks=chunks, recompute="full"),
        cluster="selene",
        software=find_software("megatron-2021"),
        step_s=float(record["iter_time_s"]),
    )


def _january_2021(record: Record) -> list[MeasuredRun]:
    """Read rows with degrees and microbatches of the April table, without interleaving."""
    model_parallel, num_devices = int(record["model_parallel_size"]), int(record["n_gpus"])
    tensor = min(model_parallel, 8)
    microbatches = {"1.7B": 16, "3.6B": 16, "7.5B": 16, "18B": 8, "39B": 4, "76B": 2, "145B": 2}
    model = gpt(
        hidden=int(record["hidden"]), layers=int(record["layers"]), heads=int(record["heads"]),
        sequence=2048, vocabulary=51200,
    )  # fmt: skip
    batch = int(record["global_batch"])
    flops = step_flops(model, batch, "hardware-full-recompute")
    return [
        MeasuredRun(
            row=record["model"],
            model=model,
            config=ParallelConfig(
                tensor=tensor,
                pipeline=model_parallel // tensor,
                data=num_devices // model_parallel,
                microbatch=microbatches.get(record["model"], 1),
                global_batch=batch,
                recompute="full",
            ),
            cluster="selene",
            software=replace(find_software("megatron-2021"), scatters_activations=False),
            step_s=flops / (float(record["tflops_per_gpu"]) * 1e12 * num_devices),
        )
    ]


def _korthikanti(record: Record) -> list[MeasuredRun]:
    common = {**record, "seq": "2048", "vocab": "51200", "dp": "1"}
    row = MeasuredRun(
        row=f"{record['model']} full recompute",
        model=gpt_of(common),
        config=config_of(common, chunks=int(record["v"]), recompute="full"),
        cluster="selene",
        software=find_software("megatron-2022"),
        step_s=float(record["iter_full_recompute_s"]),
    )
    both = replace(
        row,
        row=f"{record['model']} sequence parallel, selective recompute",
        config=replace(row.config, recompute="selective", sequence_parallel=True),
        step_s=float(record["iter_seqpar_selective_s"]),
    )
    return [row, both]


def _mt_nlg(record: Record) -> list[MeasuredRun]:
    common = {
        **record, "hidden": "20480", "layers": "105", "heads": "128", "seq": "2048",
        "vocab": "51200", "microbatch": "1",
    }  # fmt: skip
    return [
        MeasuredRun(
            row=f"on {record['n_gpus']}",
            model=gpt_of(common),
            config=config_of(common, recompute="full", zero=1),
            cluster="selene",
            software=find_software("megatron-deepspeed"),
            step_s=float(record["iter_time_s"]),
        )
    ]


# ── BLOOM ────────────────────────────────────────────────────────────────────────────────────────


def _bloom(record: Record) -> list[MeasuredRun]:
    """Read rows; skips those with neither a time nor memory nor an out-of-memory error."""
    is_oom = record["oom"] == "1"
    step_s = float(record["iter_time_s"]) if record["iter_time_s"] else None
    memory = float(record["mem_gb_max"]) * _GIB if record["mem_gb_max"] else None
    if not is_oom and step_s is None and memory is None:
        return []
    config = config_of(record, recompute="full", zero=int(record["zero_stage"]))
    if config.num_devices != int(record["n_gpus"]):
        return []  # a slip in the source: its degrees need another number of devices
    sums_in_float32 = "fp32" in record["precision"]
    return [
        MeasuredRun(
            row=f"line {record['source_line']}",
            model=gpt_of(record),
            config=replace(config, layers=bloom_stages(int(record["layers"]), config.pipeline)),
            cluster="jean-zay",
            software=replace(
                find_software("megatron-deepspeed"),
                dtype="float16" if record["precision"] == "fp16" else "bfloat16",
                gradient_bytes=4 if sums_in_float32 else 2,
                # DeepSpeed's optimizer for bfloat16 keeps the gradients that it has summed.
                spare_gradient_bytes=2 if sums_in_float32 else 0,
            ),
            step_s=step_s,
            memory_bytes=memory,
            is_oom=is_oom,
        )
    ]


def bloom_stages(layers: int, pipeline: int) -> tuple[int, ...] | None:
    """Layers per stage: None if even, else one less at both ends, or full stages and a rest."""
    if layers % pipeline == 0:
        return None
    if (layers + 2) % pipeline == 0:
        inner = (layers + 2) // pipeline
        return (inner - 1, *[inner] * (pipeline - 2), inner - 1)
    full = -(-layers // pipeline)
    num_full = layers // full
    rest = [layers - num_full * full] if layers > num_full * full else []
    # Stages that would stay empty take a layer from the full ones.
    stages = [full] * num_full + rest
    while len(stages) < pipeline:
        stages[stages.index(max(stages))] -= 1
        stages.append(1)
    return tuple(stages)


# ── vTrain ───────────────────────────────────────────────────────────────────────────────────────


def _vtrain(record: Record, cluster: str, recompute: str) -> list[MeasuredRun]:
    common = {
        "hidden": record["hidden size"],
        "layers": record["# layers"],
        "heads": record["attention heads"],
        "seq": record["sequence length"],
        "vocab": "51200",
        "tp": record["tensor parallelism"],
        "dp": record["data parallelism"],
        "pp": record["pipeline parallelism"],
        "microbatch": record["micro batch"],
        "global_batch": record["global batch"],
    }
    return [
        MeasuredRun(
            row="",
            model=gpt_of(common),
            config=config_of(common, recompute=recompute),
            cluster=cluster,
            # Megatron's own pipeline: that of DeepSpeed would send whole activations between hosts.
            software=find_software("megatron-2021"),
            step_s=float(record["iteration time (ms)"]) / 1e3,
        )
    ]


def _vtrain_single(record: Record) -> list[MeasuredRun]:
    # Its best rows would reach 61 % of the peak if they computed the layers twice.
    return _vtrain(record, "vtrain-host", "none")


def _vtrain_multi(record: Record) -> list[MeasuredRun]:
    # Its large microbatches fit no GPU of that time unless layers are recomputed.
    return _vtrain(record, "vtrain", "full")


READERS: Mapping[str, tuple[str, Callable[[Record], list[MeasuredRun]]]] = {
    "sc21-table1": ("megatron_sc21_table1.csv", _sc21_table1),
    "sc21-table2": ("megatron_sc21_table2.csv", _sc21_table2),
    "sc21-zero3": ("megatron_sc21_table2.csv", _sc21_zero3),
    "megatron-january-2021": ("megatron_readme_jan2021.csv", _january_2021),
    "korthikanti-table5": ("korthikanti_table5.csv", _korthikanti),
    "mt-nlg": ("mt_nlg_530b.csv", _mt_nlg),
    "h100-weak-scaling": ("megatron_h100_weak_scaling.csv", h100_weak_scaling),
    "h100-strong-scaling": ("megatron_h100_strong_scaling.csv", h100_strong_scaling),
    "nemo-h100-float8": ("nemo_2407_h100_fp8.csv", nemo_float8),
    "dgx-a100-2020": ("megatron_readme_2020_dgx.csv", dgx_a100_2020),
    "dgx2-v100-2020": ("megatron_readme_2020_dgx.csv", dgx2_2020),
    "bloom": ("bloom_176b_topology_search.csv", _bloom),
    "vtrain-multi": ("vtrain/ground_truth_multi.csv", _vtrain_multi),
    "vtrain-single": ("vtrain/ground_truth_single.csv", _vtrain_single),
    "fsdp-h100": ("mosaicml_llmfoundry_fsdp.csv", fsdp_h100),
    "fsdp-h100-float8": ("mosaicml_llmfoundry_fsdp.csv", fsdp_h100_float8),
    "fsdp-a100-80g": ("mosaicml_llmfoundry_fsdp.csv", fsdp_a100_80g),
    "fsdp-a100-40g": ("mosaicml_llmfoundry_fsdp.csv", fsdp_a100_40g),
    "torchtitan": ("torchtitan_benchmarks.csv", titan),
    "torchtitan-float8": ("torchtitan_benchmarks.csv", titan_float8),
    "bridge-h100": ("megatron_bridge_performance.csv", bridge_dense),
    "bridge-h100-experts": ("megatron_bridge_performance.csv", bridge_experts),
    "bridge-blackwell": ("megatron_bridge_performance.csv", blackwell_dense),
    "bridge-blackwell-experts": ("megatron_bridge_performance.csv", blackwell_experts),
    "bridge-latent": ("megatron_bridge_performance.csv", bridge_latent),
}
"""File of each table, and the reader of its rows."""


def run_cells(run: MeasuredRun) -> dict[str, Any]:
    """Columns of one run in a table of `hocket.cost.parallel.measured_runs`."""
    base = find_software(run.software.name)
    program = {
        f.name: getattr(run.software, f.name)
        for f in fields(Software)
        if getattr(run.software, f.name) != getattr(base, f.name)
    }
    config = {f.name: getattr(run.config, f.name) for f in fields(ParallelConfig)}
    stages = " ".join(map(str, config.pop("layers") or ()))
    del config["shares"]
    model = model_to_dict(run.model)
    if run.model.experts is not None:
        model = {"model": f"{run.model.name}.toml", "sequence": run.model.sequence}
    for name in ("name", "source"):
        model.pop(name, None)
    memory_gib = None if run.memory_bytes is None else run.memory_bytes / 2**30
    return {
        "row": run.row, "cluster": run.cluster, "release": run.release,
        "software": run.software.name, **program, **model, **config, "stages": stages,
        "step_s": run.step_s, "memory_gib": memory_gib, "oom": run.is_oom,
    }  # fmt: skip


def model_toml(model: Transformer) -> str:
    """A mixture of experts as the TOML file of a model."""
    data = model_to_dict(model)
    tables = {name: data.pop(name) for name in ("experts", "latent") if name in data}
    lines = [f"{key} = {_toml(value)}" for key, value in data.items()]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {value}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


def write_table(path: Path, runs: list[MeasuredRun]) -> None:
    """Write runs as one table, with a TOML file for each mixture of experts."""
    rows = [run_cells(run) for run in runs]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in rows:
            values = (row.get(name) for name in columns)
            writer.writerow(
                "" if value is None else int(value) if isinstance(value, bool) else value
                for value in values
            )
    for run in runs:
        if run.model.experts is not None:
            (path.parent / f"{run.model.name}.toml").write_text(model_toml(run.model))


def read_public(path: Path) -> list[dict[str, str]]:
    """Read the rows of a public CSV file, without comments on its source."""
    # Headers of some public files begin with "# " themselves.
    lines = path.read_text().splitlines(keepends=True)
    return list(csv.DictReader(x for x in lines if not x.startswith(("# source", "# note"))))


def convert(public: Path, folder: Path) -> None:
    """Write the tables of all known files of one folder into another folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (file, read) in READERS.items():
        if (public / file).is_file():
            runs = [
                replace(run, row=f"{number} {run.row}".strip())
                for number, record in enumerate(read_public(public / file), start=1)
                for run in read(record)
            ]
            write_table(folder / f"{name}.csv", runs)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
