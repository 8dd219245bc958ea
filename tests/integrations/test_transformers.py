"""HocketTrainer against transformers.Trainer: same data, same schedule, same weights."""

import pytest
import torch

from hocket.base.errors import UsageError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from hocket.integrations.transformers import HocketTrainer  # noqa: E402


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def make_rows() -> list[dict[str, torch.Tensor]]:
    rows = []
    for number in range(24):
        ids = (torch.arange(16) * (number + 1)) % 61
        labels = ids.clone()
        labels[: number % 5] = -100  # batches with different numbers of counted tokens
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def trained(trainer_class, folder, *, arguments=None, **options):
    settings = transformers.TrainingArguments(
        str(folder), max_steps=6, learning_rate=1e-2, report_to=[], use_cpu=True,
        per_device_train_batch_size=4, save_strategy="no", disable_tqdm=True, logging_steps=1,
        max_grad_norm=0.5, lr_scheduler_type="cosine", **(arguments or {}),
    )  # fmt: skip
    rows = make_rows()
    trainer = trainer_class(
        make_model(), settings, train_dataset=rows, eval_dataset=rows[:8], **options
    )
    trainer.train()
    return trainer


def weights(trainer):
    return {name: p.detach().cpu() for name, p in trainer.model.named_parameters()}


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("options", [{"on": "1xv100-16g"}, {"memory": "700KiB"}])
@pytest.mark.parametrize("arguments", [{}, {"gradient_accumulation_steps": 2}])
def test_trains_to_the_weights_of_the_plain_trainer(tmp_path, options, arguments):
    plain = trained(transformers.Trainer, tmp_path / "plain", arguments=arguments)
    ours = trained(HocketTrainer, tmp_path / "ours", arguments=arguments, **options)
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-6)
    expected, found = weights(plain), weights(ours)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    assert ours.prepared.predicted_step_s > 0
    if "memory" in options:
        assert ours.prepared.memory.peak_bytes <= 700 * 2**10


def test_label_smoothing_of_the_trainer_applies(tmp_path):
    smoothing = {"label_smoothing_factor": 0.1}
    plain = trained(transformers.Trainer, tmp_path / "plain", arguments=smoothing)
    ours = trained(HocketTrainer, tmp_path / "ours", arguments=smoothing, on="1xv100-16g")
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-6)


def test_a_checkpoint_of_the_trainer_continues(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole = trained(HocketTrainer, tmp_path / "whole", on="1xv100-16g")
    settings = transformers.TrainingArguments(
        str(tmp_path / "cut"), max_steps=6, learning_rate=1e-2, report_to=[], use_cpu=True,
        per_device_train_batch_size=4, disable_tqdm=True, max_grad_norm=0.5,
        lr_scheduler_type="cosine", **saving,
    )  # fmt: skip
    HocketTrainer(make_model(), settings, train_dataset=make_rows(), on="1xv100-16g").train()
    resumed = HocketTrainer(make_model(), settings, train_dataset=make_rows(), on="1xv100-16g")
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-3"))
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[name], value, rtol=1e-6, atol=1e-8)


def test_two_things_that_recompute_are_refused(tmp_path):
    with pytest.raises(UsageError, match="recomputed"):
        trained(
            HocketTrainer, tmp_path, arguments={"gradient_checkpointing": True}, memory="700KiB"
        )


def test_autocast_of_the_trainer_applies(tmp_path):
    narrow = {"bf16": True}
    plain = trained(transformers.Trainer, tmp_path / "plain", arguments=narrow)
    ours = trained(HocketTrainer, tmp_path / "ours", arguments=narrow, on="1xv100-16g")
    full = trained(transformers.Trainer, tmp_path / "full")
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-5)
    assert losses(ours) != pytest.approx(losses(full), rel=1e-5)
