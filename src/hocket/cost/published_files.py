"""Readers of public measurement files in the form in which they were published.

Each reader turns a row of one table into measured configs, with assumptions for what the row does
not say; a file may contain several tables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from hocket.base.errors import InputFileError
from hocket.cost.parallel.options import with_options
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.softwares import find_software
from hocket.cost.published_megatron import (
    blackwell_dense,
    blackwell_experts,
    bridge_dense,
    bridge_experts,
    dgx2_2020,
    dgx_a100_2020,
    h100_strong_scaling,
    h100_weak_scaling,
    nemo_float8,
)
from hocket.cost.published_tables import Measured, Record, config_of, gpt, gpt_of, read_records
from hocket.transformer import ParallelConfig
from hocket.transformer.counts import step_flops
from hocket.transformer.files import find_model

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


def _llm_foundry(record: Record) -> Measured:
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
    return Measured(
        table="",
        row=f"{record['model']} {record['seq']} on {record['n_gpus']}",
        model=model,
        config=config,
        cluster=_MPT_SITES[record["gpu"]],
        software=software,
        step_s=config.global_batch * model.sequence / float(record["tokens_per_s"]),
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
    return Measured(
        table="",
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


def titan(record: Record) -> list[Measured]:
    """16-bit runs."""
    return [] if "float8" in record["techniques"] else [_titan(record)]


def titan_float8(record: Record) -> list[Measured]:
    """8-bit runs."""
    return [_titan(record)] if "float8" in record["techniques"] else []


_GIB = 2**30
"""Bytes of the unit that nvidia-smi reports."""


def read_public(data_dir: Path) -> dict[str, list[Measured]]:
    """Tables of all known files in a folder; missing files are skipped."""
    if not data_dir.is_dir():
        raise InputFileError("no such folder", where=str(data_dir))
    tables: dict[str, list[Measured]] = {}
    for name, (file, read) in READERS.items():
        path = data_dir / file
        if path.is_file():
            tables[name] = _rows(name, path, read)
    if not tables:
        known = sorted({file for file, _ in READERS.values()})
        raise InputFileError(
            "holds no known file", hint=f"known: {', '.join(known)}", where=str(data_dir)
        )
    return tables


def absent_tables(tables: Collection[str]) -> dict[str, str]:
    """Tables that have a reader but are not among the given ones, each with its file."""
    return {name: file for name, (file, _) in READERS.items() if name not in tables}


def _rows(name: str, path: Path, read: Callable[[Record], list[Measured]]) -> list[Measured]:
    rows = []
    for number, record in enumerate(read_records(path), start=1):
        try:
            found = read(record)
        except (KeyError, ValueError, TypeError, ArithmeticError) as error:
            raise InputFileError(
                f"row {number} cannot be read: {error}",
                hint="the file is not the one that this reader knows",
                where=str(path),
            ) from None
        rows += [replace(row, table=name, row=f"{number} {row.row}".strip()) for row in found]
    return rows


# ── Selene ───────────────────────────────────────────────────────────────────────────────────────


def _sc21_table1(record: Record) -> list[Measured]:
    return [_selene(record, row=record["model"], chunks=int(record["v"]))]


def _sc21_table2(record: Record) -> list[Measured]:
    if record["scheme"] != "PTD-P":
        return []
    # Its throughputs fall with the number of microbatches as they do without interleaving.
    return [_selene(record, row=f"{record['params_billion']}B on {record['n_gpus']}")]


def _sc21_zero3(record: Record) -> list[Measured]:
    if record["scheme"] != "ZeRO-3":
        return []
    row = _selene(record, row=f"{record['params_billion']}B on {record['n_gpus']}")
    return [
        replace(row, config=replace(row.config, zero=3), software=find_software("deepspeed-zero3"))
    ]


def _selene(record: Record, row: str, chunks: int = 1) -> Measured:
    return Measured(
        table="",
        row=row,
        model=gpt_of(record),
        config=config_of(record, chunks=chunks, recompute="full"),
        cluster="selene",
        software=find_software("megatron-2021"),
        step_s=float(record["iter_time_s"]),
    )


def _january_2021(record: Record) -> list[Measured]:
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
        Measured(
            table="",
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


def _korthikanti(record: Record) -> list[Measured]:
    common = {**record, "seq": "2048", "vocab": "51200", "dp": "1"}
    row = Measured(
        table="",
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


def _mt_nlg(record: Record) -> list[Measured]:
    common = {
        **record, "hidden": "20480", "layers": "105", "heads": "128", "seq": "2048",
        "vocab": "51200", "microbatch": "1",
    }  # fmt: skip
    return [
        Measured(
            table="",
            row=f"on {record['n_gpus']}",
            model=gpt_of(common),
            config=config_of(common, recompute="full", zero=1),
            cluster="selene",
            software=find_software("megatron-deepspeed"),
            step_s=float(record["iter_time_s"]),
        )
    ]


# ── BLOOM ────────────────────────────────────────────────────────────────────────────────────────


def _bloom(record: Record) -> list[Measured]:
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
        Measured(
            table="",
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


def _vtrain(record: Record, cluster: str, recompute: str) -> list[Measured]:
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
        Measured(
            table="",
            row="",
            model=gpt_of(common),
            config=config_of(common, recompute=recompute),
            cluster=cluster,
            # Megatron's own pipeline: that of DeepSpeed would send whole activations between hosts.
            software=find_software("megatron-2021"),
            step_s=float(record["iteration time (ms)"]) / 1e3,
        )
    ]


def _vtrain_single(record: Record) -> list[Measured]:
    # Its best rows would reach 61 % of the peak if they computed the layers twice.
    return _vtrain(record, "vtrain-host", "none")


def _vtrain_multi(record: Record) -> list[Measured]:
    # Its large microbatches fit no GPU of that time unless layers are recomputed.
    return _vtrain(record, "vtrain", "full")


READERS: Mapping[str, tuple[str, Callable[[Record], list[Measured]]]] = {
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
}
"""File of each table, and the reader of its rows."""
