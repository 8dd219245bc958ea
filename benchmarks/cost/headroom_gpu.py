"""Memory of a GPU that no tensor of a plan can have: context, library workspaces, fragmentation.

    python benchmarks/cost/headroom_gpu.py [--json FILE] [--only-limits]

Needs torch and a CUDA device that nothing else uses. The context is what the driver reports as used
once a process has touched the device; libraries add their kernels and handles when they are first
used; the allocator holds more than its tensors need, the more so where sizes change from step to
step. `headroom` in presets/kinds.toml is made from the three. With ``--only-limits`` each case is
trained under limits close to its peak (`torch.cuda.set_per_process_memory_fraction`): the least
that it runs in tells what fragmentation needs when the allocator must give back what it keeps.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

MIB = 2**20
MOST_STEPS = 8
"""Under a limit: one of each length that sequences have."""


def main() -> None:
    """Print a table, and write the numbers where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    parser.add_argument("--only-limits", action="store_true", help="only train under limits")
    options = parser.parse_args()
    if options.only_limits:
        print_limits(options.json)
        return
    before = _used_by_smi_mib()
    torch.zeros(1, device="cuda")
    context = _outside_allocator_mib()
    _touch_libraries()
    libraries = _outside_allocator_mib()
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "total_mib": torch.cuda.mem_get_info()[1] / MIB,
        "used_before_mib": before,
        "context_mib": context,
        "with_libraries_mib": libraries,
        "workspace_mib": _kept_workspace_mib(),
        "cases": [_case(name, step, count) for name, step, count in _cases()],
        "outside_at_end_mib": _outside_allocator_mib(),
    }
    print(f"{result['device']}, torch {result['torch']}, {result['total_mib']:.0f} MiB")
    print(f"used before this process: {before} MiB")
    print(f"context: {context:.0f} MiB; with cuBLAS, cuDNN, attention: {libraries:.0f} MiB")
    print(f"workspace that cuBLAS keeps in the allocator: {result['workspace_mib']:.0f} MiB")
    print("case | peak allocated MiB | peak reserved MiB | more by")
    for case in result["cases"]:
        print(
            f"{case['name']} | {case['allocated_mib']:.0f} | {case['reserved_mib']:.0f} | "
            f"{case['reserved_mib'] / case['allocated_mib'] - 1:.1%}"
        )
    print(f"outside the allocator at the end: {result['outside_at_end_mib']:.0f} MiB")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))


def print_limits(file: Path | None) -> None:
    """The least room that each case runs in, over the peak of its tensors."""
    _touch_libraries()
    found = [_limits(name, make, min(count, MOST_STEPS)) for name, make, count in _cases()]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(
        "case | peak allocated MiB | runs with at least | its steps take | fails with | "
        "reserved MiB without a limit"
    )
    for case in found:
        print(" | ".join(str(value) for value in case.values()))
    if file is not None:
        file.write_text(json.dumps(found, indent=1))


def _limits(
    name: str, make: Callable[[], Callable[[int], None]], count: int
) -> dict[str, str | float]:
    total = torch.cuda.mem_get_info()[1]
    free = _case(name, make, count)
    peak_bytes = free["allocated_mib"] * MIB
    least, failed, slower = "none of them", "-", "-"
    for share in (0.1, 0.05, 0.03, 0.015, 0.01, 0.005, 0.0):
        gc.collect()  # optimizers are in cycles: what they hold would count as used
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(peak_bytes * (1 + share) / total)
        try:
            limited = _case(name, make, count)
        except torch.cuda.OutOfMemoryError:
            failed = f"{share:.1%} more"
            break
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        least = f"{share:.1%} more"
        slower = f"{limited['seconds'] / free['seconds'] - 1:+.0%}"
    return {
        "name": name, "allocated_mib": round(free["allocated_mib"]), "least": least,
        "slower": slower, "failed": failed, "reserved_mib": round(free["reserved_mib"]),
    }  # fmt: skip


def _used_by_smi_mib() -> int | None:
    """What the driver itself holds before any process uses the device."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(text.split()[0])


def _outside_allocator_mib() -> float:
    """Used memory that is none of the allocator's."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / MIB


def _touch_libraries() -> None:
    """Use once what training uses: matrix products of each type, convolution, attention, norms."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(512, 512, device="cuda", dtype=dtype, requires_grad=True)
        nn.functional.layer_norm(x @ x, (512,)).sum().backward()
        image = torch.randn(8, 64, 56, 56, device="cuda", dtype=dtype, requires_grad=True)
        kernel = torch.randn(64, 64, 3, 3, device="cuda", dtype=dtype, requires_grad=True)
        nn.functional.conv2d(image, kernel, padding=1).sum().backward()
        heads = torch.randn(2, 8, 256, 64, device="cuda", dtype=dtype, requires_grad=True)
        nn.functional.scaled_dot_product_attention(
            heads, heads, heads, is_causal=True
        ).sum().backward()


def _kept_workspace_mib() -> float:
    """What stays allocated when every tensor of ours is gone."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() / MIB


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = width // 64

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def _transformer(
    layers: int, width: int, dtype: torch.dtype, lengths: list[int], batch: int
) -> Callable[[int], None]:
    with torch.device("cuda"):
        blocks = [_Block(width).to(dtype) for _ in range(layers)]
        ends = nn.Embedding(50257, width, dtype=dtype), nn.Linear(width, 50257, dtype=dtype)
    model = nn.Sequential(ends[0], *blocks, ends[1])
    update = torch.optim.AdamW(model.parameters(), fused=True)

    def step(number: int) -> None:
        tokens = torch.randint(50257, (batch, lengths[number % len(lengths)]), device="cuda")
        update.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        update.step()

    return step


def _convnet(batch: int) -> Callable[[int], None]:
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 128, 256, 512):
        for stride in (2, 1, 1):
            layers += [nn.Conv2d(channels, width, 3, stride, 1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
    model = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)
    ).cuda()
    update = torch.optim.AdamW(model.parameters(), fused=True)

    def step(number: int) -> None:
        images = torch.randn(batch, 3, 224, 224, device="cuda")
        update.zero_grad()
        model(images).square().mean().backward()
        update.step()

    return step


def _cases() -> Iterator[tuple[str, Callable[[], Callable[[int], None]], int]]:
    fixed, changing = [1024], [1024, 600, 832, 1000, 712, 960, 512, 1016]
    for layers, width, batch in ((12, 768, 16), (24, 1024, 16), (24, 2048, 16)):
        name = f"{layers} layers of {width}, batch {batch} x 1024, float32"
        yield name, lambda a=(layers, width, torch.float32, fixed, batch): _transformer(*a), 4
    for name, lengths in (("1024", fixed), ("512 to 1024", changing)):
        whole = f"24 layers of 2048, batch 32 x {name}, bfloat16"
        yield whole, lambda a=(24, 2048, torch.bfloat16, lengths, 32): _transformer(*a), 16
    yield "12 convolutions, batch 256", lambda: _convnet(256), 6


def _case(name: str, make: Callable[[], Callable[[int], None]], count: int) -> dict[str, Any]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = make()
    step(0)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for number in range(1, count):
        step(number)
    torch.cuda.synchronize()
    return {
        "name": name,
        "seconds": time.perf_counter() - started,
        "allocated_mib": torch.cuda.max_memory_allocated() / MIB,
        "reserved_mib": torch.cuda.max_memory_reserved() / MIB,
    }


if __name__ == "__main__":
    main()
