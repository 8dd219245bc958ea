"""Accelerate's loop with hocket: same weights as without, and device maps that it takes."""

import pytest
import torch
from torch import nn

accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState  # noqa: E402

import hocket  # noqa: E402
from hocket.integrations.accelerate import device_map, dispatch, prepare  # noqa: E402


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": nn.functional.mse_loss(x, y)}


def batches():
    draws = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, 16, generator=draws), "y": torch.randn(8, 16, generator=draws)}
            for _ in range(8)]  # fmt: skip


def trained(precision, **settings):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=precision
    )
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if settings:
        run, optimizer = prepare(accelerator, model, optimizer, batches()[0], **settings)
    else:
        wrapped, optimizer = accelerator.prepare(model, optimizer)
        run = lambda batch: wrapped(**batch)["loss"]  # noqa: E731
    losses = []
    for batch in batches():
        with accelerator.accumulate(model):
            loss = run(batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return model, losses


@pytest.mark.parametrize("settings", [{"on": "1xv100-16g"}, {"memory": "16KiB"}])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_trains_to_the_weights_of_accelerate(precision, settings):
    plain, expected = trained(precision)
    ours, losses = trained(precision, **settings)
    close = {"no": 1e-6, "bf16": 1e-2}[precision]
    assert losses == pytest.approx(expected, rel=close)
    for name, weight in plain.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], weight, rtol=close, atol=close), name


def test_a_placement_is_dispatched_by_accelerate(tmp_path):
    plan = tmp_path / "plan.json"
    hocket.auto(Model(), batches()[0], on="1xcpu-core", planners="m-topo").save(plan)
    found = device_map(plan)
    assert set(found.values()) <= {"cpu"}
    model = dispatch(Model(), plan)
    with torch.no_grad():
        found, expected = (each(**batches()[0])["loss"] for each in (model, Model()))
    assert torch.equal(found, expected)
