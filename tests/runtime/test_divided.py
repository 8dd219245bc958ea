"""Parallel configs train a user's module: losses, weights and states as in one process."""

import functools

import forked
import pytest
from runtime.divided_ranks import differences, shuffled, write_plans

SMALL = (
    "unequal", "owners", "sharded", "pipeline", "tied-split", "looped", "hollow", "placed",
    "accumulated", "waves", "cut", "parts", "budget",
)  # fmt: skip
NAMED = (
    "gpt2-pipeline", "gpt2-tensor", "qwen2-tensor", "qwen2-sharded", "opt-tensor", "bert-tensor",
)  # fmt: skip
FOUR = (
    "data-pipeline", "tensor-pipeline", "data-tensor", "uneven", "cut-parts", "put-off", "turns",
)  # fmt: skip
RESUMED = ("resume:budget", "resume:parts", "resume:looped")
RESUMED_FOUR = ("resume:data-pipeline", "resume:data-tensor")
STARTS = (
    (2, (*SMALL, "save", "priority", "single")), (2, NAMED), (2, RESUMED),
    (4, (*FOUR, *RESUMED_FOUR)),
)  # fmt: skip
"""How many ranks carry out which cases, one after another; what is resumed was saved before."""
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("divided")


@pytest.fixture(scope="module")
def found(folder):
    """What each rank sees of a case; each start of ranks is part of the first test that asks."""

    @functools.cache
    def ranks(start):
        if {*STARTS[start][1]} & {*RESUMED, *RESUMED_FOUR}:
            ranks(0)
        write_plans(folder, STARTS[start][1])
        return forked.answers(STARTS[start][0], differences, folder, STARTS[start][1])

    def of(case):
        start = next(number for number, (_, cases) in enumerate(STARTS) if case in cases)
        return [rank[case] for rank in ranks(start)]

    return of


@pytest.mark.parametrize("case", [*SMALL, *NAMED, *FOUR])
def test_a_config_trains_as_one_process_does(found, case):
    for seen in found(case):
        assert seen["keys"]
        for what in ("loss", "weights", "states", "evaluate", "predict"):
            assert seen[what] < TOLERANCE, (what, seen[what])


def test_each_device_of_a_data_parallel_config_keeps_a_memory_budget(found):
    for seen in found("budget"):
        assert seen["blocks"], "blocks are offloaded or recomputed"


def test_gradients_by_priority_train_as_one_process_does(found):
    for seen in found("priority"):
        assert seen.pop("crosses")
        assert max(seen.values()) < 1e-5, seen


def test_shards_in_single_precision_train_as_one_process_does(found):
    """PyTorch reduces these by other means than double precision, which Gloo must have."""
    for seen in found("single"):
        assert max(seen["loss"], seen["weights"]) < 1e-3, seen


def test_ranks_of_a_placement_clip_in_the_numbers_of_the_model(found):
    """Norms in single precision were 1e-9 away."""
    assert all(seen["weights"] < 1e-12 for seen in found("placed"))


@pytest.mark.parametrize("case", ["sharded", "pipeline", "hollow", "tied-split", "gpt2-tensor",
                                  "cut", "parts", "data-pipeline", "tensor-pipeline",
                                  "data-tensor", "cut-parts"])  # fmt: skip
def test_a_rank_holds_its_part_of_the_weights_alone(found, case):
    held, total = [seen["held"] for seen in found(case)], found(case)[0]["total"]
    assert max(held) < 0.85 * total
    assert sum(held) >= total


@pytest.mark.parametrize("case", [*RESUMED, *RESUMED_FOUR])
def test_a_checkpoint_resumes_on_other_ranks_with_another_config(found, case):
    for seen in found(case):
        for what, error in seen.items():
            assert error < TOLERANCE, (what, error)


def test_ranks_that_shuffle_for_themselves_are_refused_in_the_first_step():
    for errors in forked.answers(2, shuffled):
        assert len(errors) == 2
        for error in errors:
            assert "rank 1 was given another batch than rank 0" in error
            assert "manual_seed(0)" in error
