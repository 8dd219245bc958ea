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


def main() -> None:
    print("| question | published | hocket (simulated) |")
    print("|---|---|---|")
    best = predicted("gpt-1t", "--on", "384xdgx-a100-80g", "--batch", "3072", *MEGATRON)
    degrees = f"t{best['tensor']} p{best['pipeline']} d{best['data']}"
    print(f"| 1 T parameters, 3,072 A100s | t8 p64 d6 | {degrees} |", flush=True)
    on = ("gpt3-175b", "--on", "12xdgx-a100-80g", *MEGATRON)
    for batch in (12, 24, 36, 48, 60):
        fixed = "tensor=8,pipeline=12,data=1,microbatch=1,recompute=full"
        steps_s = [
            float(
                str(predicted(*on, "--batch", str(batch), "--fix", f"{fixed},chunks={n}")["step_s"])
            )
            for n in (1, 2)
        ]
        gain = f"{steps_s[0] / steps_s[1]:.3f}"
        print(
            f"| interleaved stages, 175 B, batch {batch} | larger when small | {gain} |", flush=True
        )


if __name__ == "__main__":
    main()
