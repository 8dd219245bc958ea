"""`hocket plan` and `hocket parallel` on ten configurations: one answer.

    python benchmarks/parallelism/same_answer.py

Both commands get the same model, cluster, batch, sequence length and precision, and must print the
same step.
"""

from __future__ import annotations

import json

from click.testing import CliRunner

from hocket.cli.root import root

CONFIGURATIONS = (
    ("llama3-8b", "dgx-h100", 16, 4096),
    ("llama3-8b", "2xdgx-h100", 32, 4096),
    ("llama3-8b", "dgx-a100-80g", 16, 4096),
    ("llama-7b", "dgx-h100", 16, 4096),
    ("llama-1b", "4xa100-80g", 32, 2048),
    ("gpt-1.7b", "dgx-a100-80g", 32, 2048),
    ("gpt-3.6b", "dgx-h100", 32, 2048),
    ("gpt2-xl", "dgx-h100", 32, 1024),
    ("gpt2-medium", "dgx-a100-80g", 64, 1024),
    ("vit-base", "4xa100-80g", 256, None),
)
"""Model, cluster, samples per step, sequence length."""


def main() -> None:
    """Print one line per configuration; exit 1 where the commands differ."""
    differ = False
    for model, on, batch, seq in CONFIGURATIONS:
        size = ["--batch", str(batch), *(["--seq", str(seq)] if seq else [])]
        asked = [model, "--on", on, *size, "--json"]
        plan = _answer(["plan", *asked, "--amp", "bf16"])
        parallel = _answer(["parallel", *asked, "--dtype", "bfloat16"])
        differ |= plan["step_s"] != parallel["step_s"]
        print(
            f"{model:12s} {on:14s} {batch:4d} {seq or '-':>5} {plan['chosen']:24s} "
            f"plan {plan['step_s'] * 1e3:8.2f} ms, parallel {parallel['step_s'] * 1e3:8.2f} ms "
            f"({parallel['answered_by']})",
            flush=True,
        )
    raise SystemExit(differ)


def _answer(arguments: list[str]) -> dict:  # type: ignore[type-arg]
    result = CliRunner().invoke(root, arguments)
    assert result.exit_code == 0, result.output[-2000:]
    return dict(json.loads(result.stdout))


if __name__ == "__main__":
    main()
