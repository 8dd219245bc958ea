"""Dropout on several ranks: replicas draw for themselves, a resumed step draws the same."""

import forked
import pytest
from runtime.dropout_ranks import seen

from hocket.transformer import ParallelConfig

CONFIGS = {
    "data": ParallelConfig(data=4, global_batch=4),
    "data x pipeline": ParallelConfig(data=2, pipeline=2, global_batch=2, microbatch=1),
    "microbatches": ParallelConfig(data=2, pipeline=2, global_batch=4, microbatch=1),
}


@pytest.fixture(scope="module")
def ranks():
    return forked.answers(4, seen, CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_replicas_draw_other_masks_and_a_resumed_step_the_same(ranks, name):
    for found in (rank[name] for rank in ranks):
        first, second, third = found["steps"]
        assert first != second != third
        assert found["again"] == [second, third]
        scales = [scale for scale in first if scale is not None]
        assert scales, "every rank has a layer"
        # The mean over samples of masks that are 0 or 4: alike ones would give no other value.
        num_samples = CONFIGS[name].global_batch
        values = {value for scale in scales for value in scale}
        assert values <= {4 * kept / num_samples for kept in range(num_samples + 1)}
        assert values - {0.0, 4.0}, "replicas draw the same"
