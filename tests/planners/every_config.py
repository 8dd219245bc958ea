"""All configs of a training at once, for tests that look at each of them."""

from hocket.planners.parallel.space import config_blocks, joined
from hocket.transformer import ParallelConfigs


def enumerate_configs(model, pool, global_batch, limits):
    """All configs that exist, as one set of arrays; see `config_blocks` for their order."""
    blocks = [b.configs for b in config_blocks(model, pool, global_batch, limits)]
    return joined(blocks) if blocks else ParallelConfigs.of([])
