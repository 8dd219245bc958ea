"""HocketStrategy against Lightning's own: same data, same schedule, same weights."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hocket.base.errors import UsageError

lightning = pytest.importorskip("lightning")

from hocket.integrations.lightning import HocketStrategy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.losses, self.validated = [], []

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.validated.append(float(nn.functional.mse_loss(self(x), y)))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]


class TwoOptimizers(Regression):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.layers[i].parameters(), lr=0.1) for i in range(2)]


def rows():
    draws = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 16, generator=draws), torch.randn(8, 16, generator=draws))
            for _ in range(8)]  # fmt: skip


def fitted(module, folder, strategy, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu" if strategy == "auto" else "auto", strategy=strategy, max_epochs=2,
            logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder, **options,
        )  # fmt: skip
        trainer.fit(module, DataLoader(rows(), None), DataLoader(rows()[:2], None))
    return trainer


@pytest.mark.parametrize("settings", [{"on": "1xv100-16g"}, {"memory": "16KiB"}])
@pytest.mark.parametrize(
    "options", [{"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 2}], ids=str
)
def test_trains_to_the_weights_of_lightning(tmp_path, settings, options):
    plain, ours = Regression(), Regression()
    fitted(plain, tmp_path / "plain", "auto", **options)
    strategy = HocketStrategy(**settings)
    trainer = fitted(ours, tmp_path / "ours", strategy, **options)
    assert strategy.prepared is not None
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
    assert ours.validated == pytest.approx(plain.validated, rel=1e-5)
    for name, expected in plain.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], expected, rtol=1e-5, atol=1e-7), name
    file = tmp_path / "saved.ckpt"
    trainer.save_checkpoint(file)
    saved = torch.load(file, weights_only=False)["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in ours.state_dict().items())


def test_several_optimizers_are_refused(tmp_path):
    module = TwoOptimizers()
    with pytest.raises((UsageError, RuntimeError), match="optimizer"):
        fitted(module, tmp_path, HocketStrategy(on="1xv100-16g"))
