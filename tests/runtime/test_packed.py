"""Rows of several sequences: a step is rehearsed with the masks that it makes, and no others."""

import pytest
import torch
from runtime import hf_models
from runtime.train_loops import adamw

import hocket
from hocket.capture.packed import rows_are_whole
from hocket.runtime.offload.memory_tracker import MemoryTracker

PACKED = torch.tensor(4 * [16 * [0, 1, 2, 3]])


@pytest.mark.parametrize("more", [{}, {"position_ids": PACKED}], ids=["whole", "packed"])
def test_steps_hold_what_was_rehearsed_whatever_the_rows_are(more):
    """Keys that heads share are repeated beside a mask, and only there."""
    torch.manual_seed(0)
    model, batch, _ = hf_models.llama()
    batch = {**batch, **more}
    train = hocket.prepare(model, adamw(model), batch, memory="3MiB")
    tracker = MemoryTracker()
    with tracker:
        tracker.track(train._strategy.lasting)
        tracker.track(batch.values())
        for _ in range(2):
            train.step(batch)
        train.state_dict()
    assert tracker.peak_bytes == train.memory.peak_bytes


def test_what_models_look_for_is_as_it_was_afterwards():
    from transformers import masking_utils

    before = masking_utils.find_packed_sequence_indices
    with rows_are_whole({}):
        assert masking_utils.find_packed_sequence_indices is not before
        # Where there are numbers they tell.
        assert masking_utils.find_packed_sequence_indices(PACKED) is not None
        assert masking_utils.find_packed_sequence_indices(PACKED[:, :4]) is None
    assert masking_utils.find_packed_sequence_indices is before


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_masks_of_ones_are_left_out_as_in_plain_steps_and_padding_is_noticed(name):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 32,
             "num_hidden_layers": 2, "max_position_embeddings": 16}  # fmt: skip
    config = transformers.AutoConfig.for_model(name, **small)
    kind = (
        transformers.AutoModelForCausalLM if name == "llama" else transformers.AutoModelForMaskedLM
    )
    words = torch.randint(3, 30, (2, 8))
    ones, padded = torch.ones_like(words), torch.ones_like(words)
    padded[1, 5:] = 0
    losses = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = kind.from_config(config).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [{"input_ids": words, "attention_mask": m, "labels": words}
                   for m in (ones, padded, ones, padded)]  # fmt: skip
        train = None if is_plain else hocket.prepare(model, optimizer, batches[0])
        torch.manual_seed(1)
        for batch in batches:
            if train is not None:
                losses.append(train.step(batch).item())
                continue
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:4] == losses[4:]
