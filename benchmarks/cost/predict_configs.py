"""Predicted against measured for models from outside the zoo, built from configurations.

    python benchmarks/cost/predict_configs.py --on 1xh200-141g [--out DIR] [--budget SECONDS]

Each configuration is written to a file, read as ``hocket plan config.json`` reads it, captured,
profiled, predicted and really trained; small batches are limited by the host. Nothing of these
models was used to choose a constant; the calibration is fitted to three cases of the zoo in the
same run. Needs one CUDA device; results as of ``predict.py``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from predict import (
    Captured,
    Case,
    attempt,
    cluster_for,
    predict_calibrated,
    say,
    write_results,
)

Config = dict[str, Any]
_COMMON = {"vocab_size": 32000, "hidden_act": "silu"}
FIT = (
    Case("gpt2", 16, 1024, "float32", "fit"),
    Case("gpt2", 32, 1024, "bfloat16", "fit"),
    Case("resnet50", 128, 1, "float32", "fit"),
)
"""What the calibration sees; first, for they must be there when the time is used up."""
HERE = Path(__file__).parent
BUILT = (
    (f"{HERE / 'unet.py'}:unet", (16, 64, "float32")),
    (f"{HERE / 'unet.py'}:unet", (16, 64, "bfloat16")),
    (f"{HERE / 'small_nets.py'}:resnet56", (256, 32, "float32")),
    (f"{HERE / 'small_nets.py'}:words", (20, 35, "float32")),
    (f"{HERE / 'small_nets.py'}:words", (20, 35, "bfloat16")),
)
"""Models that functions build."""
CONFIGS: dict[str, tuple[Config, tuple[tuple[int, int, str], ...]]] = {
    "opt-350m": (
        {"model_type": "opt", "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24,
         "num_attention_heads": 16, "word_embed_proj_dim": 1024, "vocab_size": 50272},
        ((8, 1024, "bfloat16"), (1, 128, "bfloat16")),
    ),
    "whisper-small": (
        {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"],
         "d_model": 768, "encoder_layers": 12, "decoder_layers": 12,
         "encoder_attention_heads": 12, "decoder_attention_heads": 12, "encoder_ffn_dim": 3072,
         "decoder_ffn_dim": 3072, "vocab_size": 51865},
        ((8, 128, "bfloat16"),),
    ),
    "qwen2-0.5b": (
        {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
         "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
         "vocab_size": 151936, "tie_word_embeddings": True},
        ((8, 1024, "bfloat16"), (2, 256, "bfloat16"), (4, 1024, "float32")),
    ),
    "llama3-1b": (
        {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
         "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
         "vocab_size": 128256, "tie_word_embeddings": True},
        ((4, 2048, "bfloat16"),),
    ),
    "mistral-1b": (
        {**_COMMON, "model_type": "mistral", "hidden_size": 2048, "intermediate_size": 7168,
         "num_hidden_layers": 20, "num_attention_heads": 16, "num_key_value_heads": 4},
        ((4, 2048, "bfloat16"),),
    ),
    "gemma-1b": (
        {**_COMMON, "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 8192,
         "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 1,
         "head_dim": 256},
        ((4, 1024, "bfloat16"),),
    ),
    "pythia-410m": (
        {"model_type": "gpt_neox", "hidden_size": 1024, "intermediate_size": 4096,
         "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 50304},
        ((8, 1024, "bfloat16"), (1, 128, "bfloat16")),
    ),
    "phi3-mini-half": (
        {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192,
         "num_hidden_layers": 16, "num_attention_heads": 32, "vocab_size": 32064},
        ((2, 2048, "bfloat16"),),
    ),
    "vit-large": (
        {"model_type": "vit", "architectures": ["ViTForImageClassification"],
         "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
         "num_attention_heads": 16, "image_size": 224, "patch_size": 16},
        ((64, 1, "bfloat16"),),
    ),
    "convnext-base": (
        {"model_type": "convnext", "architectures": ["ConvNextForImageClassification"],
         "hidden_sizes": [128, 256, 512, 1024], "depths": [3, 3, 27, 3], "image_size": 224},
        ((64, 1, "float32"),),
    ),
    "t5-large": (
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 1024,
         "d_ff": 4096, "num_layers": 24, "num_heads": 16, "decoder_start_token_id": 0},
        ((8, 512, "bfloat16"),),
    ),
    "bert-base": (
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        ((32, 512, "bfloat16"), (8, 128, "bfloat16")),
    ),
}  # fmt: skip
"""Configurations with the batches, sequence lengths and types that are tried."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--on", default="", help="cluster whose first device kind this machine has")
    parser.add_argument("--out", type=Path, default=Path("config-results"))
    parser.add_argument("--budget", type=float, default=300.0)
    arguments = parser.parse_args()
    started = time.perf_counter()
    cluster = cluster_for("cuda", arguments.on)
    rows: list[dict[str, Any]] = []
    captured: dict[str, Captured] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder)):
            if time.perf_counter() - started > arguments.budget:
                break
            attempt(case, rows, captured, cluster, "cuda")
            say(f"{case.label}: done after {time.perf_counter() - started:.0f} s")
        calibration = predict_calibrated(rows, captured, cluster)
    write_results(arguments.out, rows, captured, cluster, calibration)
    print((arguments.out / "table.md").read_text(), end="", flush=True)


def cases(folder: Path) -> list[Case]:
    """The configurations as files, with each of their batches."""
    found = [*FIT, *(Case(name, *size, "held out") for name, size in BUILT)]
    for name, (config, sizes) in CONFIGS.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(config))
        found += [Case(str(path), *size, "held out") for size in sizes]
    return found


if __name__ == "__main__":
    main()
