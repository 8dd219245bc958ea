"""Two processes on this machine: the step that is predicted for them and the one that is measured.

    .venv/bin/python benchmarks/runtime/two_processes.py [THREADS] [MODEL …]   # minutes, calm cores

`hocket detect --processes 2` measures the link and the cost of a message, `hocket profile
--processes 2` times each op while another process is at work, and plans that must send much (layers
in blocks) and little (`auto`) are carried out by gloo. Results: ``docs/how-to/runtime.md``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODELS = (
    ("gpt2", "--batch", "1", "--seq", "128"),
    ("resnet50", "--batch", "4"),
    ("bert-large", "--batch", "1", "--seq", "64"),
    ("lstm",),
)
PLANNERS = ("layer-blocks", "auto")
STEPS = "12"


def hocket(folder: Path, threads: str, *words: str) -> dict[str, Any]:
    """What a command prints as JSON."""
    command = (sys.executable, "-m", "hocket", *words, "--json")
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"hocket {' '.join(words)}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> None:
    threads = sys.argv[1] if len(sys.argv) > 1 else str(max(1, (os.cpu_count() or 2) // 2))
    wanted = sys.argv[2:] or [name for name, *_ in MODELS]
    print("| model | planner | predicted, ms | measured, ms | predicted / measured |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        hocket(folder, threads, "detect", "--processes", "2", "-o", "two.toml")
        for name, *size in (model for model in MODELS if model[0] in wanted):
            hocket(
                folder, threads, "profile", name, *size, "-o", f"{name}.json", "--seconds", "60",
                "--device", "cpu", "--processes", "2",
            )  # fmt: skip
            for planner in PLANNERS:
                hocket(
                    folder, threads, "plan", name, *size, "--on", "two.toml", "--planner", planner,
                    "--profile", f"{name}.json", "-o", "plan.json",
                )  # fmt: skip
                ran = hocket(
                    folder, threads, "run", "plan.json", "--backend", "gloo", "--steps", STEPS,
                    "--threads", threads,
                )  # fmt: skip
                predicted_s, measured_s = ran["step_s"]["predicted"], ran["step_s"]["measured"]
                cells = f"{predicted_s * 1e3:.0f} | {measured_s * 1e3:.0f}"
                print(f"| {name} | {planner} | {cells} | {predicted_s / measured_s:.2f} |")


if __name__ == "__main__":
    main()
