"""Memory of cuDNN's recurrent layers on a GPU: reserve, and workspaces of both passes.

    python benchmarks/cost/recurrent_memory.py            (on a GPU, under a minute)

For each layer: bytes that the forward op returns as its reserve, bytes beyond inputs and results
while the forward and the backward op run (workspaces), and the same in units of one value per time
step, row, hidden unit, layer and direction.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

MODES = {"lstm": nn.LSTM, "gru": nn.GRU}


def beyond(run: object) -> tuple[object, int]:
    """Result of a call, and the bytes that it held beside its result at its peak."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()  # type: ignore[operator]
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    return result, torch.cuda.max_memory_allocated() - max(before, after)


def measured(
    mode: str, batch: int, seq: int, width: int, layers: int, both: bool, dtype: torch.dtype
) -> str:
    net = MODES[mode](width, width, layers, batch_first=True, bidirectional=both)
    net = net.to("cuda", dtype)
    inputs = torch.randn(batch, seq, width, device="cuda", dtype=dtype, requires_grad=True)
    net(inputs)[0].sum().backward()  # libraries allocate their own at the first call
    before = torch.cuda.memory_allocated()
    (output, _), forward_bytes = beyond(lambda: net(inputs))  # type: ignore[misc]
    saved_bytes = torch.cuda.memory_allocated() - before
    gradient = torch.ones_like(output)
    _, backward_bytes = beyond(lambda: output.backward(gradient))
    directions = 2 if both else 1
    values = batch * seq * width * layers * directions * output.element_size()
    weights = sum(each.numel() for each in net.parameters()) * output.element_size()
    held = [saved_bytes, forward_bytes, backward_bytes]
    return (
        f"| {mode} {batch} x {seq} x {width}, {layers} layers, {directions} directions, "
        f"{str(dtype).removeprefix('torch.')} | {weights / 2**20:.1f} | "
        + " | ".join(f"{each / 2**20:.1f} ({each / values:.2f})" for each in held)
        + " |"
    )


def main() -> None:
    print("| layer | weights MiB | saved MiB (values) | forward beyond | backward beyond |")
    print("|---|---:|---:|---:|---:|")
    shapes = [(256, 128, 512, 2, True), (16, 128, 512, 2, True), (64, 64, 1024, 1, False),
              (64, 64, 1024, 4, False), (8, 256, 256, 2, False)]  # fmt: skip
    for mode, dtype, shape in itertools.product(MODES, (torch.float32, torch.bfloat16), shapes):
        print(measured(mode, *shape, dtype), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
