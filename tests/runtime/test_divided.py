"""Divisions carry a person's own module: the same losses, weights and states as one process."""

import forked
import pytest
from runtime.divided_ranks import differences

TWO = (
    "unequal", "owners", "sharded", "pipeline", "tied-split", "looped", "gpt2-pipeline",
    "gpt2-tensor", "qwen2-tensor", "qwen2-sharded", "opt-tensor", "bert-tensor", "hollow", "placed",
    "accumulated", "cut",
)  # fmt: skip
FOUR = ("data-pipeline", "tensor-pipeline", "data-tensor", "uneven")
RESUMED = ("resume:data-pipeline", "resume:data-tensor")
TOLERANCE = 1e-6
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("divided")


@pytest.fixture(scope="module")
def found(folder):
    """By case, what each rank saw."""
    two = forked.answers(2, differences, folder, [*TWO, "save"])
    four = forked.answers(4, differences, folder, [*FOUR, *RESUMED])
    return {case: [rank[case] for rank in ranks] for ranks in (two, four) for case in ranks[0]}


@pytest.mark.parametrize("case", [*TWO, *FOUR])
def test_a_division_trains_as_one_process_does(found, case):
    for seen in found[case]:
        assert seen["keys"]
        for what in ("loss", "weights", "states", "evaluate", "predict"):
            assert seen[what] < TOLERANCE, (what, seen[what])


def test_ranks_of_a_placement_clip_in_the_numbers_of_the_model(found):
    """Norms in single precision were 1e-9 away."""
    assert all(seen["weights"] < 1e-12 for seen in found["placed"])


@pytest.mark.parametrize("case", ["sharded", "pipeline", "hollow", "tied-split", "gpt2-tensor",
                                  "cut", "data-pipeline", "tensor-pipeline",
                                  "data-tensor"])  # fmt: skip
def test_a_rank_holds_its_part_of_the_weights_alone(found, case):
    held, total = [seen["held"] for seen in found[case]], found[case][0]["total"]
    assert max(held) < 0.85 * total
    assert sum(held) >= total


@pytest.mark.parametrize("case", RESUMED)
def test_a_checkpoint_resumes_on_other_ranks_with_another_division(found, case):
    for seen in found[case]:
        for what, error in seen.items():
            assert error < TOLERANCE, (what, error)
