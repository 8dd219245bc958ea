"""All divisions of a training at once, for tests that look at each of them."""

from hocket.planners.parallel.space import division_blocks, joined
from hocket.transformer import ParallelConfigs


def enumerate_divisions(model, pool, global_batch, limits):
    """All divisions that exist, as one set of arrays; see `division_blocks` for their order."""
    blocks = [b.divisions for b in division_blocks(model, pool, global_batch, limits)]
    return joined(blocks) if blocks else ParallelConfigs.of([])
