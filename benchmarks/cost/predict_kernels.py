"""Rates of the kernels that predictions are made of, measured on one accelerator.

    python benchmarks/cost/predict_kernels.py [--out DIR]

Matrix products by shape (bfloat16, float8, grouped), attention by sequence and head width, bytes
that norms, activations, losses and optimizers move, what the host takes to launch an op (eager,
with gradients, replayed graphs), and which attention kernel `scaled_dot_product_attention` takes.
Writes ``kernels.json``; needs PyTorch with CUDA and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Row = dict[str, Any]
DEVICE = "cuda"
MEASURED_S = 0.05
"""Time that each kernel is repeated for: long enough for the clocks of a busy device."""
WEIGHTS = (
    (768, 2304), (768, 3072), (1024, 4096), (2048, 6144), (2048, 8192), (8192, 2048), (4096, 4096),
    (4096, 14336), (14336, 4096), (5120, 20480), (7168, 28672), (8192, 8192), (8192, 3584),
    (8192, 57344), (512, 4096), (1024, 8192),
)  # fmt: skip
"""Summed dimension and columns."""
ROWS = (256, 1024, 4096, 16384, 65536)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("kernel-results"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "parts": {},
    }
    for part in (products, float8, grouped, attention, moved, optimizers, launches, choices):
        start = time.perf_counter()
        rows: list[Row] = []
        try:
            for row in part():
                rows.append(row)
        except Exception as error:
            rows.append({"error": f"{type(error).__name__}: {error}"[:300]})
        torch.cuda.empty_cache()
        result["parts"][part.__name__] = rows
        (arguments.out / "kernels.json").write_text(json.dumps(result, indent=1))
        seconds = time.perf_counter() - start
        print(f"{part.__name__}: {len(rows)} rows in {seconds:.1f} s", file=sys.stderr, flush=True)
        for row in rows[-1:]:
            print(f"  {row}", file=sys.stderr, flush=True)


def seconds_of(work: Callable[[], object]) -> float:
    """Device time of one repetition."""
    for _ in range(3):
        work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count = 2
    while True:
        torch.cuda.synchronize()
        begin.record()
        for _ in range(count):
            work()
        end.record()
        torch.cuda.synchronize()
        total_s = begin.elapsed_time(end) / 1e3
        if total_s >= MEASURED_S or count > 20_000:
            return total_s / count
        count = max(2 * count, int(count * 1.2 * MEASURED_S / max(total_s, 1e-6)))


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


# ── matrix products ──────────────────────────────────────────────────────────────────────────────


def products() -> Iterator[Row]:
    for depth, columns in WEIGHTS:
        weight = randn(columns, depth)
        for rows in ROWS:
            given, gradient = randn(rows, depth), randn(rows, columns)
            ways = {
                "forward": lambda g=given, w=weight: g @ w.t(),
                "input": lambda d=gradient, w=weight: d @ w,
                "weight": lambda g=given, d=gradient: d.t() @ g,
            }
            for way, work in ways.items():
                seconds = seconds_of(work)
                rate = 2 * rows * depth * columns / seconds / 1e12
                yield {"rows": rows, "depth": depth, "columns": columns, "way": way,
                       "s": seconds, "tflops": rate}  # fmt: skip


def float8() -> Iterator[Row]:
    kind = torch.float8_e4m3fn
    for depth, columns in WEIGHTS:
        for rows in ROWS[1:]:
            left = randn(rows, depth).to(kind)
            right = randn(columns, depth).to(kind).t()
            one = torch.ones((), device=DEVICE)
            by_row = (torch.ones(rows, 1, device=DEVICE), torch.ones(1, columns, device=DEVICE))
            for way, scales in (("tensor", (one, one)), ("row", by_row)):
                seconds = seconds_of(
                    lambda s=scales, a=left, b=right: torch._scaled_mm(
                        a, b, scale_a=s[0], scale_b=s[1], out_dtype=torch.bfloat16,
                        use_fast_accum=True,
                    )
                )  # fmt: skip
                rate = 2 * rows * depth * columns / seconds / 1e12
                yield {"rows": rows, "depth": depth, "columns": columns, "scales": way,
                       "s": seconds, "tflops": rate}  # fmt: skip


def grouped() -> Iterator[Row]:
    """Products of experts: rows are spread evenly over the groups."""
    for groups, depth, columns in (
        (8, 4096, 14336), (8, 4096, 28672), (8, 2048, 1536), (16, 2048, 1536), (128, 2048, 1536),
        (128, 768, 2048), (64, 7168, 4096), (32, 2880, 5760),
    ):  # fmt: skip
        for rows in (8192, 32768, 131072):
            weight = randn(groups, depth, columns)
            given = randn(rows, depth)
            ends = torch.arange(1, groups + 1, device=DEVICE, dtype=torch.int32) * (rows // groups)
            seconds = seconds_of(lambda g=given, w=weight, e=ends: torch._grouped_mm(g, w, offs=e))
            rate = 2 * rows * depth * columns / seconds / 1e12
            yield {"groups": groups, "rows": rows, "depth": depth, "columns": columns,
                   "s": seconds, "tflops": rate}  # fmt: skip
            del weight, given


# ── attention ────────────────────────────────────────────────────────────────────────────────────


def attention() -> Iterator[Row]:
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    for name, backend in backends.items():
        for width, heads in ((64, 32), (128, 16), (128, 32)):
            for seq in (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536):
                batch = max(1, 16384 // seq)
                try:
                    yield _attention_row(name, backend, batch, heads, seq, width)
                except RuntimeError as error:
                    yield {"backend": name, "seq": seq, "width": width, "error": str(error)[:100]}


def _attention_row(
    name: str, backend: SDPBackend, batch: int, heads: int, seq: int, width: int
) -> Row:
    query, key, value = (randn(batch, heads, seq, width).requires_grad_() for _ in range(3))
    with sdpa_kernel(backend):

        def forward() -> torch.Tensor:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

        out = forward()
        with torch.no_grad():
            forward_s = seconds_of(forward)
        gradient = torch.randn_like(out)
        backward_s = seconds_of(
            lambda: torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True)
        )
    flops = 0.5 * 4 * batch * heads * seq**2 * width
    return {"backend": name, "batch": batch, "heads": heads, "seq": seq, "width": width,
            "forward_s": forward_s, "backward_s": backward_s,
            "forward_tflops": flops / forward_s / 1e12,
            "backward_tflops": 2.5 * flops / backward_s / 1e12}  # fmt: skip


# ── bytes moved ──────────────────────────────────────────────────────────────────────────────────


def moved() -> Iterator[Row]:
    """Time of ops that wait for memory, over the bytes of their inputs and outputs."""
    for tokens, width in ((4096, 1024), (16384, 2048), (16384, 4096), (16384, 8192)):
        given, other = randn(tokens, width), randn(tokens, width)
        scale, bias = randn(width), randn(width)
        size = given.nbytes
        works: dict[str, tuple[Callable[[], object], float]] = {
            "copy": (given.clone, 2 * size),
            "add": (lambda a=given, b=other: a + b, 3 * size),
            "gelu": (lambda a=given: functional.gelu(a), 2 * size),
            "silu": (lambda a=given: functional.silu(a), 2 * size),
            "dropout": (lambda a=given: functional.dropout(a, 0.1), 2.5 * size),
            "to float32": (given.float, 3 * size),
            "layer norm": (
                lambda a=given, s=scale, b=bias, w=width: functional.layer_norm(a, (w,), s, b),
                2 * size,
            ),
            "rms norm": (
                lambda a=given, s=scale, w=width: functional.rms_norm(a, (w,), s),
                2 * size,
            ),
            "amax": (lambda a=given: a.abs().amax(), 3 * size),
            "to float8": (lambda a=given: (a * 2.0).to(torch.float8_e4m3fn), 3.5 * size),
        }
        for name, (work, bytes_moved) in works.items():
            seconds = seconds_of(work)
            yield {"op": name, "tokens": tokens, "width": width, "s": seconds,
                   "gbps": bytes_moved / seconds / 1e9}  # fmt: skip
    for tokens, words in ((8192, 50304), (8192, 128256)):
        logits = randn(tokens, words, dtype=torch.float32).requires_grad_()
        target = torch.randint(words, (tokens,), device=DEVICE)

        def both(logits: torch.Tensor = logits, target: torch.Tensor = target) -> object:
            loss = functional.cross_entropy(logits, target)
            return torch.autograd.grad(loss, logits)

        yield {"op": "cross entropy", "tokens": tokens, "words": words, "s": seconds_of(both),
               "logit_bytes": logits.nbytes}  # fmt: skip
        del logits


def optimizers() -> Iterator[Row]:
    for dtype in (torch.float32, torch.bfloat16):
        for fused in (False, True):
            parameters = [nn.Parameter(randn(4096, 8192, dtype=dtype)) for _ in range(12)]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer = torch.optim.AdamW(parameters, fused=fused, foreach=not fused)
            count = sum(parameter.numel() for parameter in parameters)
            yield {"op": "adamw", "fused": fused, "dtype": str(dtype), "parameters": count,
                   "s": seconds_of(optimizer.step)}  # fmt: skip
            clip_s = seconds_of(lambda p=parameters: nn.utils.clip_grad_norm_(p, 1.0))
            yield {"op": "clip", "dtype": str(dtype), "parameters": count, "s": clip_s}
            del parameters, optimizer


# ── the host ─────────────────────────────────────────────────────────────────────────────────────


def host_s(work: Callable[[], object], count: int = 300) -> float:
    """Wall time of one repetition where the device has next to nothing to do."""
    for _ in range(20):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def launches() -> Iterator[Row]:
    small, weight = randn(32, 64), randn(64, 64)
    linear, norm = (
        nn.Linear(64, 64).to(DEVICE, torch.bfloat16),
        nn.LayerNorm(64).to(DEVICE, torch.bfloat16),
    )
    ops: dict[str, Callable[[], object]] = {
        "add": lambda: small + small,
        "view": lambda: small.view(64, 32),
        "mm": lambda: small @ weight,
        "gelu": lambda: functional.gelu(small),
        "layer norm": lambda: functional.layer_norm(small, (64,)),
        "linear module": lambda: linear(small),
        "norm module": lambda: norm(small),
        "attention": lambda: functional.scaled_dot_product_attention(
            small.view(1, 1, 32, 64), small.view(1, 1, 32, 64), small.view(1, 1, 32, 64)
        ),
    }
    for name, work in ops.items():
        with torch.no_grad():
            yield {"op": name, "mode": "no gradients", "s": host_s(work)}
        yield {"op": name, "mode": "recorded", "s": host_s(work)}
    leaf = randn(32, 64).requires_grad_()

    def chain(count: int = 50) -> torch.Tensor:
        out = leaf
        for _ in range(count):
            out = functional.gelu(out)
        return out

    forward_s = host_s(chain, 50) / 50
    both_s = host_s(lambda: torch.autograd.grad(chain().sum(), leaf), 50) / 50
    yield {"op": "gelu", "mode": "chain forward", "s": forward_s}
    yield {"op": "gelu", "mode": "chain backward", "s": both_s - forward_s}
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        chain()
        with torch.cuda.graph(graph):
            chain(200)
        yield {"op": "gelu", "mode": "replayed", "s": host_s(graph.replay, 50) / 200}
    for count in (10, 100):
        parameters = [nn.Parameter(randn(64, 64)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        for fused in (False, True):
            optimizer = torch.optim.AdamW(parameters, fused=fused, foreach=not fused)
            yield {"op": "adamw", "fused": fused, "parameters": count,
                   "s": host_s(optimizer.step, 50)}  # fmt: skip
            yield {"op": "zero_grad", "parameters": count,
                   "s": host_s(lambda o=optimizer: o.zero_grad(set_to_none=False), 50)}  # fmt: skip


# ── which attention kernel ───────────────────────────────────────────────────────────────────────


def choices() -> Iterator[Row]:
    """The kernel that is taken without a word, and the memory of a forward and backward pass."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for width in (32, 64, 80, 96, 128, 256, 512):
            for mask in ("none", "causal", "given", "given with gradient-free rows"):
                for groups in (1, 4):
                    yield _choice(dtype, width, mask, groups)


def _choice(dtype: torch.dtype, width: int, mask: str, groups: int) -> Row:
    heads, seq = 8, 1024
    query = randn(2, heads, seq, width, dtype=dtype).requires_grad_()
    key, value = (
        randn(2, heads // groups, seq, width, dtype=dtype).requires_grad_() for _ in range(2)
    )
    given = None
    if mask.startswith("given"):
        shape = (2, 1, seq, seq) if mask == "given" else (1, 1, 1, seq)
        given = torch.zeros(shape, device=DEVICE, dtype=dtype)
    row: Row = {"dtype": str(dtype).removeprefix("torch."), "width": width, "mask": mask,
                "groups": groups}  # fmt: skip
    try:
        row["choice"] = int(
            torch._fused_sdp_choice(
                query, key, value, given, 0.0, mask == "causal", enable_gqa=groups > 1
            )
        )
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = functional.scaled_dot_product_attention(
            query, key, value, given, is_causal=mask == "causal", enable_gqa=groups > 1
        )
        row["kept_bytes"] = torch.cuda.memory_allocated() - before
        row["forward_peak_bytes"] = torch.cuda.max_memory_allocated() - before
        row["node"] = type(out.grad_fn).__name__
        out.backward(torch.ones_like(out))
        row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    except RuntimeError as error:
        row["error"] = str(error)[:120]
    return row


if __name__ == "__main__":
    main()
