"""PTD-P's headline choices: degrees for a trillion parameters, and what interleaving gains.

Run: python benchmarks/systems/ptdp.py

Simulated. Published (Narayanan et al., SC 2021): GPT with 1 T parameters on 3,072 A100s runs with
tensor 8, pipeline 64, data 6, full recompute, at 52 % of peak; interleaved stages gain 10 % and
more at small batches of a 175 B model on 96 GPUs, less at larger ones.
"""

from __future__ import annotations

import json
import subprocess
import sys

MEGATRON = ("--software", "megatron-2021")


def predicted(*arguments: str) -> dict[str, object]:
    """The configuration that ``hocket parallel`` chooses, with its prediction."""
    command = (sys.executable, "-m", "hocket", "parallel", *arguments, "--json", "--top", "1")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    chosen: dict[str, object] = json.loads(done.stdout)["chosen"]
    return chosen


def degrees() -> str:
    """Degrees chosen for a trillion parameters on 3,072 A100s."""
    best = predicted("gpt-1t", "--on", "384xdgx-a100-80g", "--batch", "3072", *MEGATRON)
    return f"t{best['tensor']} p{best['pipeline']} d{best['data']}"


def interleaving(batch: int) -> float:
    """Step without interleaved stages over the step with two chunks per device."""
    fixed = "tensor=8,pipeline=12,data=1,microbatch=1,recompute=full"
    steps_s = [
        float(str(predicted("gpt3-175b", "--on", "12xdgx-a100-80g", *MEGATRON, "--batch",
                            str(batch), "--fix", f"{fixed},chunks={chunks}")["step_s"]))
        for chunks in (1, 2)
    ]  # fmt: skip
    return steps_s[0] / steps_s[1]


def ours() -> str:
    """Figures of the row in docs/systems.md."""
    return (
        f"simulated: {degrees()}; interleaving {interleaving(12):.2f}x at batch 12 "
        f"to {interleaving(60):.2f}x at 60"
    )


def main() -> None:
    print("| question | published | hocket (simulated) |")
    print("|---|---|---|")
    print(f"| 1 T parameters, 3,072 A100s | t8 p64 d6 | {degrees()} |", flush=True)
    for batch in (12, 24, 36, 48, 60):
        gain = f"{interleaving(batch):.3f}"
        print(
            f"| interleaved stages, 175 B, batch {batch} | larger when small | {gain} |", flush=True
        )


if __name__ == "__main__":
    main()
