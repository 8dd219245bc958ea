"""Memory plans are found once for a step, and progress is shown meanwhile."""

import copy
import time

import pytest
import torch
from runtime.budget_models import MODELS
from runtime.train_loops import adamw

import hocket
from hocket.base import disk_cache
from hocket.base.progress import progress
from hocket.runtime.strategies import budget


@pytest.fixture
def kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOCKET_DISK_CACHE", "1")


def test_a_plan_is_recalled_for_the_same_step_alone(kept_on_disk, monkeypatch):
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    start, found = copy.deepcopy(model), []
    find = budget.find_frontier
    monkeypatch.setattr(budget, "find_frontier", lambda *a, **k: found.append(1) or find(*a, **k))

    def prepared(memory, **options):
        own = copy.deepcopy(start)
        return hocket.prepare(
            own, adamw(own), batches[0], forward=forward, memory=memory, on="1xh200", **options
        )

    first, again = prepared(100_000), prepared(100_000)
    assert len(found) == 1
    assert first.memory == again.memory
    torch.manual_seed(1)
    ours = [first.step(batch).item() for batch in batches]
    torch.manual_seed(1)
    assert ours == [again.step(batch).item() for batch in batches]
    prepared(110_000)
    prepared(100_000, async_update=True)
    assert len(found) == 3


def test_what_cannot_be_read_is_found_anew(kept_on_disk, tmp_path):
    disk_cache.keep("numbers", {"a": 1}, [1, 2])
    assert disk_cache.recall("numbers", {"a": 1}) == [1, 2]
    assert disk_cache.recall("numbers", {"a": 2}) is None
    (path,) = (tmp_path / "hocket/numbers").iterdir()
    path.write_text("{")
    assert disk_cache.recall("numbers", {"a": 1}) is None


def test_work_says_nothing_unless_it_takes_long(capsys, monkeypatch):
    with progress("quick") as doing:
        doing.stage("first")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("hocket.base.progress.QUIET_S", 0.0)
    with progress("slow") as doing:
        doing.stage("first")
        time.sleep(0.01)
        doing.stage("second")
    assert [line.rpartition(" (")[0] for line in capsys.readouterr().err.splitlines()] == [
        "slow: first", "slow: second"]  # fmt: skip


def test_prepare_without_a_budget_shows_its_stages(capsys, monkeypatch):
    monkeypatch.setattr("hocket.base.progress.QUIET_S", 0.0)
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    hocket.prepare(model, adamw(model), batches[0], forward=forward, on="2xv100-16g")
    lines = capsys.readouterr().err.splitlines()
    stages = [line.partition(": ")[2].rpartition(" (")[0] for line in lines if "prepare:" in line]
    name = type(model).__name__
    assert stages[0] == f"{name}: trace the step and choose a plan"
