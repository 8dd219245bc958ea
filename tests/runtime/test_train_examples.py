"""The training examples run as their first lines say, are short, and learn something."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMANDS = {
    "train_text.py": [__file__, "--on", "1xv100-16g", "--steps", "30"],
    "train_digits.py": ["--on", "1xv100-16g", "--epochs", "2"],
    "train_trainer.py": ["--on", "1xv100-16g", "--steps", "10"],
    "train_fleet.py": ["--steps", "60", "--checkpoints", "here"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_learns(name, monkeypatch, capsys, tmp_path):
    if name == "train_digits.py":
        pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *COMMANDS[name]])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    losses = [float(text) for text in re.findall(r"loss ([0-9.]+)", capsys.readouterr().out)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("train_*.py")), ids=lambda path: path.name)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) <= 60
