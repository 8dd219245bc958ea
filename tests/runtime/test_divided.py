"""Divisions carry a person's own module: the same losses, weights and states as one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.runtime.connect import MeetingStore

SCRIPT = Path(__file__).with_name("divided_ranks.py")
TWO = (
    "unequal", "owners", "sharded", "pipeline", "tied-split", "looped", "gpt2-pipeline",
    "gpt2-tensor", "qwen2-tensor", "qwen2-sharded", "opt-tensor", "bert-tensor", "hollow", "placed",
)  # fmt: skip
FOUR = ("data-pipeline", "tensor-pipeline", "data-tensor")
RESUMED = ("resume:data-pipeline", "resume:data-tensor")
TOLERANCE = 1e-6
pytestmark = pytest.mark.timeout(600)


def in_ranks(count, *arguments):
    """What rank 0 of the script prints."""
    store = MeetingStore()
    variables = {
        "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(str, arguments)],
            env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=400) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
        store.close()
    for rank, (_, errors) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return json.loads(said[0][0].splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("divided")


@pytest.fixture(scope="module")
def found(folder):
    """By case, what each rank saw."""
    two = in_ranks(2, folder, *TWO, "save")
    four = in_ranks(4, folder, *FOUR, *RESUMED)
    return {case: [rank[case] for rank in ranks] for ranks in (two, four) for case in ranks[0]}


@pytest.mark.parametrize("case", [*TWO, *FOUR])
def test_a_division_trains_as_one_process_does(found, case):
    for seen in found[case]:
        assert seen["keys"]
        for what in ("loss", "weights", "states", "evaluate", "predict"):
            assert seen[what] < TOLERANCE, (what, seen[what])


@pytest.mark.parametrize("case", ["sharded", "pipeline", "hollow", "tied-split", "gpt2-tensor",
                                  "data-pipeline", "tensor-pipeline", "data-tensor"])  # fmt: skip
def test_a_rank_holds_its_part_of_the_weights_alone(found, case):
    held, total = [seen["held"] for seen in found[case]], found[case][0]["total"]
    assert max(held) < 0.85 * total
    assert sum(held) >= total


@pytest.mark.parametrize("case", RESUMED)
def test_a_checkpoint_resumes_on_other_ranks_with_another_division(found, case):
    for seen in found[case]:
        for what, error in seen.items():
            assert error < TOLERANCE, (what, error)
