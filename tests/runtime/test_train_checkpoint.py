"""Checkpoints of a loop: whole, plain, and good for going on under another plan."""

import json
import resource
import signal
from contextlib import contextmanager

import pytest
import torch
from runtime.train_loops import adamw, assert_loops_agree, random_plan
from runtime.train_models import USER_MODELS

import hocket
from hocket.base.errors import HocketError, InputFileError, UsageError
from hocket.runtime.checkpoint import newest_checkpoint
from hocket.training import prepare


@pytest.mark.parametrize("name", ["digits", "tied", "frozen"])
def test_a_training_goes_on_under_another_plan_as_if_nothing_had_happened(name, tmp_path):
    def under_another_plan(train):
        if name == "digits":  # In the middle of an accumulated batch: gradients are pending.
            assert train.state_dict()["gradients"]
        path = train.save(tmp_path, {"epoch": 3})
        scheduled = train.optimizer
        torch.manual_seed(99)
        model, batches, forward = USER_MODELS[name]()
        optimizer = adamw(model)
        plan = random_plan(model, optimizer, batches[0], 77, forward)
        other = prepare(model, optimizer, batches[0], plan=plan, forward=forward,
                        accumulate=train.options.accumulate, clip_norm=0.5)  # fmt: skip
        assert other.load(path) == {"epoch": 3}
        # The schedule of the test changes the rates of the optimizer that it was made with.
        scheduled.param_groups = optimizer.param_groups
        return other

    steps = 14 if name == "digits" else 8
    assert_loops_agree(USER_MODELS[name], seed=2, steps=steps, halfway=under_another_plan)


@pytest.fixture
def train():
    torch.manual_seed(0)
    model, batches, _ = USER_MODELS["tied"]()
    optimizer = adamw(model)
    loop = prepare(model, optimizer, batches[0], plan=random_plan(model, optimizer, batches[0], 1))
    loop.step(batches[0])
    return loop


def test_keys_are_those_of_the_model_and_the_optimizer(train, tmp_path):
    state = train.state_dict()
    assert state["model"].keys() == train.model.state_dict().keys()
    assert state["optimizer"]["state"].keys() == train.optimizer.state_dict()["state"].keys()
    path = train.save(tmp_path)
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "tensors.safetensors"]
    manifest = json.loads((path / "manifest.json").read_text())
    tied = manifest["model"]["out.weight"]["$tensor"]
    assert tied == manifest["model"]["embed.weight"]["$tensor"]


def test_what_cannot_be_written_leaves_nothing_behind(train, tmp_path):
    with pytest.raises(UsageError, match="extra/when is of type 'object'"):
        train.save(tmp_path, {"when": object()})
    assert list(tmp_path.iterdir()) == []


@contextmanager
def files_of_at_most(num_bytes):
    """As on a disk that is full by then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_or_a_place_that_is_no_folder_is_told_in_words(train, tmp_path):
    with pytest.raises(UsageError, match="cannot write a checkpoint"), files_of_at_most(500):
        train.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write a checkpoint: File exists"):
        train.save(tmp_path / "file" / "below")


@pytest.mark.parametrize("damage", ["no manifest", "wrong format", "cut", "lost tensor"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(train, tmp_path, damage):
    path = train.save(tmp_path)
    manifest, tensors = path / "manifest.json", path / "tensors.safetensors"
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "wrong format":
        manifest.write_text('{"format": "other"}')
    elif damage == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-20])
    else:
        text = manifest.read_text()
        manifest.write_text(text.replace('"model/embed.weight"', '"model/nowhere"'))
    before = [parameter.clone() for parameter in train.model.parameters()]
    with pytest.raises((InputFileError, HocketError)):
        train.load(path)
    for old, now in zip(before, train.model.parameters(), strict=True):
        assert torch.equal(old, now)


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(train, tmp_path):
    path = train.save(tmp_path)
    model, batches, forward = USER_MODELS["digits"]()
    other = hocket.prepare(model, adamw(model), batches[0], forward=forward, on="1xv100-16g")
    with pytest.raises(UsageError, match=r"no 'features\.0\.weight'"):
        other.load(path)


def test_the_last_whole_checkpoint_of_a_folder_is_taken(tmp_path):
    for name in ("step-9", "step-10", "step-10.1", "step-11", "step-x"):
        (tmp_path / name).mkdir()
        if name != "step-11":
            (tmp_path / name / "manifest.json").write_text("{}")
    assert newest_checkpoint(tmp_path).name == "step-10.1"
    assert newest_checkpoint(tmp_path / "step-9").name == "step-9"
    with pytest.raises(InputFileError, match="no checkpoint"):
        newest_checkpoint(tmp_path / "nothing")
