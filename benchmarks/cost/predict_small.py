"""What small and narrow nets are made of, measured on one accelerator and its host.

    python benchmarks/cost/predict_small.py [--out DIR] [--device cuda]

Convolutions by channels and size, forward and backward, as a captured step has them; what batch
norms and activations between them take; recurrent layers as cuDNN runs them, with the memory that
they keep; and what the host takes per op of each family, forward and backward, in plain calls and
in modules. Writes ``small.json`` after each part; 40 s on an H200. ``--device cpu`` with
``--quick`` tries the script itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import predict_kernels
import torch
from torch import nn
from torch.nn import functional

Row = dict[str, Any]
Tensor = torch.Tensor
CONVOLUTIONS = (
    # batch, channels in and out, side, kernel, stride, groups
    (256, 3, 16, 32, 3, 1, 1), (64, 16, 16, 32, 3, 1, 1), (256, 16, 16, 32, 3, 1, 1),
    (1024, 16, 16, 32, 3, 1, 1), (256, 16, 32, 32, 3, 2, 1), (256, 32, 32, 16, 3, 1, 1),
    (256, 32, 64, 16, 3, 2, 1), (256, 64, 64, 8, 3, 1, 1), (1024, 64, 64, 8, 3, 1, 1),
    (32, 8, 8, 28, 3, 1, 1), (128, 1, 32, 28, 3, 1, 1), (128, 32, 64, 26, 3, 1, 1),
    (64, 3, 64, 224, 7, 2, 1), (64, 64, 64, 56, 1, 1, 1), (64, 64, 64, 56, 3, 1, 1),
    (64, 256, 64, 56, 1, 1, 1), (64, 64, 256, 56, 1, 1, 1), (64, 128, 128, 28, 3, 1, 1),
    (64, 256, 256, 14, 3, 1, 1), (64, 1024, 2048, 14, 1, 2, 1), (64, 512, 512, 7, 3, 1, 1),
    (16, 64, 64, 224, 3, 1, 1), (64, 512, 512, 28, 3, 1, 1), (16, 128, 128, 64, 3, 1, 1),
    (16, 256, 256, 32, 3, 1, 1), (4, 320, 320, 64, 3, 1, 1), (4, 1280, 1280, 8, 3, 1, 1),
    (128, 96, 24, 56, 1, 1, 1), (128, 24, 144, 56, 1, 1, 1), (128, 144, 144, 56, 3, 1, 144),
    (64, 128, 128, 56, 7, 1, 128), (64, 960, 960, 7, 3, 1, 960), (64, 256, 256, 28, 3, 1, 32),
    (64, 3, 1024, 224, 16, 16, 1),
)  # fmt: skip
PLANES = ((256, 16, 32), (256, 64, 8), (64, 64, 56), (64, 256, 56), (16, 128, 64), (64, 512, 7))
"""Batch, channels and side of what batch norms and activations are given."""
RECURRENT = (
    # layers, width, batch, sequence, directions
    (1, 128, 32, 100, 1), (1, 256, 16, 200, 1), (1, 512, 64, 50, 1), (2, 512, 64, 50, 1),
    (1, 512, 64, 50, 2), (2, 650, 20, 35, 1), (2, 1500, 20, 35, 1), (1, 1024, 64, 100, 1),
    (2, 1024, 128, 100, 1), (4, 1024, 128, 40, 1), (1, 2048, 64, 50, 1), (1, 512, 512, 50, 1),
)  # fmt: skip
CHAIN = 20
"""Ops in a row, so that what starts and ends a pass counts little."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("small-results"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="the smallest of everything")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    predict_kernels.DEVICE = asked.device
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "processor"
    result: Row = {"device": name, "torch": torch.__version__, "parts": {}}
    for part in (dispatches, convolutions, planes, recurrent):
        start = time.perf_counter()
        rows: list[Row] = []
        try:
            for row in part(asked.quick):
                rows.append(row)
        except Exception as error:
            rows.append({"error": f"{type(error).__name__}: {error}"[:300]})
        result["parts"][part.__name__] = rows
        (asked.out / "small.json").write_text(json.dumps(result, indent=1))
        seconds = time.perf_counter() - start
        print(f"{part.__name__}: {len(rows)} rows in {seconds:.1f} s", file=sys.stderr, flush=True)
        print(f"  {rows[-1:]}", file=sys.stderr, flush=True)


def seconds_of(work: Callable[[], object]) -> float:
    """Device time of one repetition; on a processor, the time of one."""
    if predict_kernels.DEVICE == "cuda":
        return predict_kernels.seconds_of(work)
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def host_s(work: Callable[[], object], count: int) -> float:
    """Wall time of one repetition where the device has next to nothing to do."""
    if predict_kernels.DEVICE == "cuda":
        return predict_kernels.host_s(work, count)
    return seconds_of(work)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return predict_kernels.randn(*shape, dtype=dtype)


def dtypes(quick: bool) -> tuple[torch.dtype, ...]:
    return (torch.float32,) if quick else (torch.float32, torch.bfloat16)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ── convolutions and what is between them ────────────────────────────────────────────────────────


def convolutions(quick: bool) -> Iterator[Row]:
    for batch, before, after, side, kernel, stride, groups in CONVOLUTIONS[: 2 if quick else None]:
        for dtype in dtypes(quick):
            given = randn(batch, before, side, side, dtype=dtype)
            weight = randn(after, before // groups, kernel, kernel, dtype=dtype)
            pad = [kernel // 2] * 2 if stride < kernel - 1 or kernel < 4 else [0, 0]
            steps = [stride] * 2

            def forward(g: Tensor = given, w: Tensor = weight, s=steps, p=pad, n=groups) -> Tensor:
                return torch.ops.aten.convolution(g, w, None, s, p, [1, 1], False, [0, 0], n)

            gradient = torch.randn_like(forward())

            def backward(
                d: Tensor = gradient, g: Tensor = given, w: Tensor = weight, s=steps, p=pad,
                n=groups, wanted=(True, True, False),
            ) -> object:  # fmt: skip
                return torch.ops.aten.convolution_backward(
                    d, g, w, None, s, p, [1, 1], False, [0, 0], n, list(wanted)
                )

            flops = 2.0 * gradient.numel() * weight[0].numel()
            ways = {
                "forward": (forward, flops),
                "both gradients": (backward, 2 * flops),
                "weight gradient": (
                    lambda b=backward: b(wanted=(False, True, False)),
                    flops,
                ),
            }
            for way, (work, done) in ways.items():
                seconds = seconds_of(work)
                yield {"batch": batch, "in": before, "out": after, "side": side, "kernel": kernel,
                       "stride": stride, "groups": groups, "dtype": short(dtype), "way": way,
                       "s": seconds, "tflops": done / seconds / 1e12,
                       "bytes": given.nbytes + weight.nbytes + gradient.nbytes}  # fmt: skip


def planes(quick: bool) -> Iterator[Row]:
    for batch, channels, side in PLANES[: 1 if quick else None]:
        for dtype in dtypes(quick):
            given = randn(batch, channels, side, side, dtype=dtype)
            other = torch.randn_like(given)
            ones, zeros = (f((channels,), device=given.device) for f in (torch.ones, torch.zeros))
            _, mean, scale = torch.ops.aten.native_batch_norm(
                given, ones, zeros, zeros.clone(), ones.clone(), True, 0.1, 1e-5
            )
            works: dict[str, Callable[[], object]] = {
                "batch norm": lambda g=given, o=ones, z=zeros: torch.ops.aten.native_batch_norm(
                    g, o, z, z.clone(), o.clone(), True, 0.1, 1e-5
                ),
                "batch norm backward": lambda g=given, d=other, o=ones, z=zeros, m=mean, s=scale: (
                    torch.ops.aten.native_batch_norm_backward(
                        d, g, o, z, o, m, s, True, 1e-5, [True, True, True]
                    )
                ),
                "group norm": lambda g=given: functional.group_norm(g, 8),
                "relu": lambda g=given: functional.relu(g),
                "relu backward": lambda g=given, d=other: torch.ops.aten.threshold_backward(
                    d, g, 0
                ),
                "add": lambda g=given, d=other: g + d,
            }
            for name, work in works.items():
                yield {"op": name, "batch": batch, "channels": channels, "side": side,
                       "dtype": short(dtype), "bytes": given.nbytes,
                       "s": seconds_of(work)}  # fmt: skip


# ── recurrent layers ─────────────────────────────────────────────────────────────────────────────


def recurrent(quick: bool) -> Iterator[Row]:
    for layers, width, batch, seq, directions in RECURRENT[: 1 if quick else None]:
        for kind in (nn.LSTM, nn.GRU):
            for dtype in dtypes(quick):
                net = kind(width, width, layers, bidirectional=directions == 2)
                net = net.to(predict_kernels.DEVICE, dtype)
                row: Row = {"kind": kind.__name__, "layers": layers, "width": width,
                            "batch": batch, "seq": seq, "directions": directions,
                            "dtype": short(dtype)}  # fmt: skip
                yield row | _recurrent_row(net, randn(seq, batch, width, dtype=dtype))


def _recurrent_row(net: nn.Module, given: Tensor) -> Row:
    given.requires_grad_()
    parameters = [given, *net.parameters()]
    before = torch.cuda.memory_allocated() if given.is_cuda else 0
    out = net(given)[0]
    kept = (torch.cuda.memory_allocated() if given.is_cuda else 0) - before
    gradient = torch.randn_like(out)

    def backward() -> object:
        return torch.autograd.grad(out, parameters, gradient, retain_graph=True)

    return {
        "forward_s": seconds_of(lambda: net(given)),
        "backward_s": seconds_of(backward),
        "forward_host_s": host_s(lambda: net(given), 10),
        "backward_host_s": host_s(backward, 10),
        "kept_bytes": kept,
        "result_bytes": out.nbytes,
        "weight_bytes": sum(p.nbytes for p in net.parameters()),
    }


# ── the host ─────────────────────────────────────────────────────────────────────────────────────


def dispatches(quick: bool) -> Iterator[Row]:
    """Host time per op in chains of one op, forward with gradients recorded, and backward."""
    for name, (leaf, work) in _chains().items():
        leaf.requires_grad_()

        def chain(leaf: Tensor = leaf, work: Callable[[Tensor], Tensor] = work) -> Tensor:
            out = leaf
            for _ in range(CHAIN):
                out = work(out)
            return out

        def both(leaf: Tensor = leaf, chain: Callable[[], Tensor] = chain) -> object:
            out = chain()
            return torch.autograd.grad(out, leaf, torch.ones_like(out))

        count = 1 if quick else 30
        with torch.no_grad():
            plain_s = host_s(chain, count) / CHAIN
        forward_s = host_s(chain, count) / CHAIN
        yield {"op": name, "plain_s": plain_s, "forward_s": forward_s,
               "backward_s": host_s(both, count) / CHAIN - forward_s}  # fmt: skip


def _chains() -> dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """A leaf and an op that gives its own shape again."""
    half = torch.bfloat16
    plane, rows = randn(2, 16, 8, 8), randn(2, 16, 64, dtype=half)
    matrix, heads = randn(64, 64, dtype=half), randn(2, 4, 16, 16, dtype=half)
    place = {"device": predict_kernels.DEVICE}
    convolution, weight = nn.Conv2d(16, 16, 3, padding=1, **place), randn(16, 16, 3, 3)
    norm, groups = nn.BatchNorm2d(16, **place), nn.GroupNorm(4, 16, **place)
    linear, layer_norm = (
        nn.Linear(64, 64, dtype=half, **place),
        nn.LayerNorm(64, dtype=half, **place),
    )
    silu, dropout = nn.SiLU(), nn.Dropout(0.1)
    table, ids = randn(100, 64, dtype=half), torch.randint(100, (2, 16), **place)
    return {
        "convolution": (plane, lambda x: functional.conv2d(x, weight, padding=1)),
        "convolution module": (plane, convolution),
        "batch norm module": (plane, norm),
        "group norm module": (plane, groups),
        "relu": (plane, functional.relu),
        "silu module": (plane, silu),
        "linear": (rows, lambda x: functional.linear(x, matrix)),
        "linear module": (rows, linear),
        "matrix product": (rows[0].clone(), lambda x: x @ matrix[:64]),
        "batched product": (heads, lambda x: x @ x),
        "layer norm": (rows, lambda x: functional.layer_norm(x, (64,))),
        "layer norm module": (rows, layer_norm),
        "attention": (
            heads,
            lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
        ),
        "softmax": (heads, lambda x: torch.softmax(x, -1)),
        "gelu": (rows, functional.gelu),
        "add": (rows, lambda x: x + rows),
        "multiply": (rows, lambda x: x * rows),
        "power": (rows, lambda x: x.pow(2)),
        "negate": (rows, lambda x: -x),
        "mean and add": (rows, lambda x: x + x.mean(-1, keepdim=True)),
        "dropout module": (rows, dropout),
        "view": (rows, lambda x: x.view(2, 16, 64)),
        "transpose": (heads, lambda x: x.transpose(2, 3)),
        "slice and join": (rows, lambda x: torch.cat((x[..., :32], x[..., 32:]), -1)),
        "copy": (heads, lambda x: x.transpose(2, 3).contiguous()),
        "cast there and back": (rows, lambda x: x.float().to(half)),
        "embedding and add": (rows, lambda x: x + functional.embedding(ids, table)),
    }


if __name__ == "__main__":
    main()
