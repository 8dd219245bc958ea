"""Public models at toy size train as in plain PyTorch; see benchmarks/thirdparty."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("transformers")
FOLDER = Path(__file__).parents[2] / "benchmarks" / "thirdparty"
sys.path.append(str(FOLDER))
from public_models import run, subjects  # noqa: E402

NAMES = (
    "gpt2", "llama", "qwen3", "gemma2", "mixtral", "bert", "deberta-v2", "t5", "bart", "vit",
    "swin", "convnext",
)  # fmt: skip
SUBJECTS = dict(subjects(tomllib.loads((FOLDER / "manifest.toml").read_text()), "transformers"))


@pytest.mark.parametrize("name", NAMES)
def test_a_public_model_trains_as_in_plain_pytorch(name: str) -> None:
    row = run(name, SUBJECTS[f"transformers {name}"], budgets=False)
    assert row.result == "equal", row


def test_the_manifest_names_enough_models() -> None:
    manifest = tomllib.loads((FOLDER / "manifest.toml").read_text())
    assert len(dict(subjects(manifest, ""))) >= 120
