"""Mixed precision, and what a plan is for, on the command line."""

import json

import pytest

FACTORY = """\
import sys
import torch

def ends():
    sys.exit(0)

def large(batch=2):
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(16384, 16384, bias=False) for _ in range(4)))
    return model, torch.zeros(batch, 16384)
"""


@pytest.fixture
def factory(tmp_path):
    (tmp_path / "own_models.py").write_text(FACTORY)
    return tmp_path / "own_models.py"


def test_amp_records_products_in_16_bits_and_is_told_and_stored(hocket, tmp_path):
    plan = tmp_path / "plan.json"
    asked = ("plan", "mlp", "--on", "1xh200", "--no-check", "-o", plan, "--amp", "bf16")
    _, err = hocket(*asked)
    assert "mlp, batch 256, bf16 autocast over float32 parameters, adamw (8 bytes of state" in err
    assert "80 % range of the step: " in err
    assert '"amp":"bf16"' in plan.read_text()
    out, _ = hocket(*asked, "--json")
    told = json.loads(out)["training"]
    assert told["amp"] == "bf16"
    expected = json.loads(out)["step_range"]
    assert expected["source"] == "datasheet"
    assert expected["low_s"] < json.loads(out)["step_s"] < expected["high_s"]
    assert told["state_bytes_per_parameter"] == 8.0


@pytest.mark.parametrize(("asked", "amp"), [((), "bf16"), (("--amp", "none"), None)])
def test_large_float32_models_are_planned_under_autocast(hocket, factory, asked, amp):
    question = ("fit", f"{factory}:large", "--on", "1xh200", "--loss", "mean", "--json")
    out, err = hocket(*question, *asked)
    assert json.loads(out)["training"]["amp"] == amp
    assert ("planned under bf16 autocast" in err) is (amp is not None and not asked)


def test_a_factory_that_ends_the_process_is_an_error(hocket, factory):
    out, err = hocket("plan", f"{factory}:ends", "--on", "1xh200", "--json", expect=2)
    assert "sys.exit(0)" in out + err
