"""Readers of public files about the DGX of 2020 and about H100; `public` has the others."""

from __future__ import annotations

from dataclasses import replace

from hocket.cost.parallel.softwares import find_software
from hocket.transformer import Division
from hocket.transformer.counts import step_flops
from hocket.transformer.files import find_model, model_from_dict
from hocket.validation.records import Record, division_of, gpt_of
from hocket.validation.rows import Measured

# ── H100 ─────────────────────────────────────────────────────────────────────────────────────────


def h100_weak_scaling(record: Record) -> list[Measured]:
    """Microbatches and chunks are not stated: one sequence and at least four chunks in pipelines;
    without one, all sequences of a replica at once, for nothing is gained by adding up."""
    replica = int(record["global_batch"]) // int(record["dp"])
    microbatch = replica if record["pp"] == "1" else 1
    common = {**record, "seq": "4096", "vocab": "131072", "microbatch": str(microbatch)}
    model = gpt_of(common, dropout=False)
    division = division_of(common, recompute="none", zero=1)
    chunks = _least_chunks(model.layers // division.pipeline) if division.pipeline > 1 else 1
    division = replace(
        division,
        sequence_parallel=division.tensor > 1,
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
    )
    flops = step_flops(model, division.global_batch, "model")
    return [
        Measured(
            table="",
            row=record["model"],
            model=model,
            division=division,
            cluster="eos",
            software=find_software("megatron-core-2024"),
            step_s=flops / (float(record["tflops_per_gpu"]) * 1e12 * division.num_devices),
        )
    ]


def _least_chunks(layers_per_stage: int) -> int:
    divisors = (n for n in range(4, layers_per_stage + 1) if layers_per_stage % n == 0)
    return next(divisors, 1)


def h100_strong_scaling(record: Record) -> list[Measured]:
    """8 x 6 is stated for 2304 GPUs only and taken for all; chunks as in weak scaling."""
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
"""Of the others, the file names no shape."""
_LLAMA = {
    "mlp": "swiglu", "vocabulary": 32000, "tied_embeddings": False, "learned_positions": False,
    "biases": False,
}  # fmt: skip


def nemo_float8(record: Record) -> list[Measured]:
    """NeMo 24.07 with 8-bit products, for the models whose shapes are known."""
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
    division = Division(
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
            division=division,
            cluster="eos",
            software=replace(find_software("megatron-core-2024"), dtype="float8"),
            step_s=division.global_batch * model.sequence / rate,
        )
    ]


# ── DGX of 2020 ──────────────────────────────────────────────────────────────────────────────────


def _dgx_2020(record: Record) -> list[Measured]:
    """Sequences of 1024 tokens and one microbatch: with these its TFLOP/s come out."""
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
            division=division_of(common, recompute="full"),
            cluster="dgx2" if is_volta else "dgx-a100-2020",
            software=find_software("megatron-2021"),
            step_s=float(record["iter_time_ms"]) / 1e3,
        )
    ]


def dgx_a100_2020(record: Record) -> list[Measured]:
    """The runs on DGX A100."""
    return [row for row in _dgx_2020(record) if row.cluster == "dgx-a100-2020"]


def dgx2_2020(record: Record) -> list[Measured]:
    """The runs on DGX-2."""
    return [row for row in _dgx_2020(record) if row.cluster == "dgx2"]
