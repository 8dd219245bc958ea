"""One model of matrix products and attention: ops of a graph and layers of a transformer agree."""

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from hocket.capture import capture
from hocket.cost.chips import chip_of
from hocket.cost.efficiency import Efficiency, KindFit, roofline_s, work_of
from hocket.cost.families import FAMILIES
from hocket.cost.matrix_kernels import power_limit
from hocket.cost.parallel.efficiency import attention_s, matrix_s
from hocket.cost.parallel.setting import setting_of
from hocket.cost.parallel.softwares import SOFTWARES
from hocket.hardware.shorthand import cluster_from_text
from hocket.transformer import Transformer

CASES = {
    "llama-8b": {"hidden": 4096, "mlp": 14336, "heads": 32, "kv_heads": 8, "seq": 4096, "batch": 1},
    "gpt3-like": {"hidden": 5120, "mlp": 20480, "heads": 40, "kv_heads": 40, "seq": 2048,
                  "batch": 2},
    "vit-like": {"hidden": 1024, "mlp": 4096, "heads": 16, "kv_heads": 16, "seq": 256,
                 "batch": 64},
}  # fmt: skip


def _of_graph(shape, kind):
    """Seconds of products and of attention of one captured layer."""
    config = transformers.LlamaConfig(
        hidden_size=shape["hidden"], intermediate_size=shape["mlp"], num_hidden_layers=1,
        num_attention_heads=shape["heads"], num_key_value_heads=shape["kv_heads"], vocab_size=64,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaModel(config).bfloat16()
        embeddings = torch.empty(
            shape["batch"], shape["seq"], shape["hidden"], dtype=torch.bfloat16, requires_grad=True
        )
    batch = {"inputs_embeds": embeddings}
    graph = capture(model, batch, loss=lambda out: out.last_hidden_state.float().sum())
    work = work_of(graph)
    # At the rate that power allows a chip which multiplies all the time, as in large runs.
    share = chip_of(kind.name).matrix_share
    seconds = roofline_s(work, kind, KindFit({"matmul": Efficiency(share, 0.8)}))
    attends = work.family == FAMILIES.index("attention")
    # Rotary angles are a product of 64 by 1 elements, in float32.
    multiplies = (work.family == FAMILIES.index("matmul")) & (graph.flops > 1e9)
    return seconds[multiplies].sum(), seconds[attends].sum()


def _of_layer(shape, kind, cluster):
    transformer = Transformer(
        name="layer", layers=1, hidden=shape["hidden"], heads=shape["heads"],
        kv_heads=shape["kv_heads"], head_width=shape["hidden"] // shape["heads"],
        mlp_width=shape["mlp"], mlp="swiglu", vocabulary=64, sequence=shape["seq"],
        tied_embeddings=True, learned_positions=False, biases=False, dropout=False,
    )  # fmt: skip
    setting = setting_of(transformer, SOFTWARES["megatron-core"], kind, cluster.network)
    tokens = shape["batch"] * shape["seq"]
    keys = shape["hidden"] * shape["kv_heads"] // shape["heads"]
    hidden, mlp = shape["hidden"], shape["mlp"]
    pairs = [(hidden, hidden)] * 2 + [(hidden, keys)] * 2 + [(hidden, mlp)] * 2 + [(mlp, hidden)]
    seconds = sum(
        float(matrix_s(*map(np.float64, three), setting))
        for depth, columns in pairs
        for three in ((tokens, columns, depth), (tokens, depth, columns), (columns, depth, tokens))
    )
    flops = np.float64(4 * shape["batch"] * shape["seq"] ** 2 * hidden)
    return seconds, float(sum(attention_s(flops, setting)))


@pytest.mark.parametrize("on", ["1xh100", "1xa100-80g"])
@pytest.mark.parametrize("case", CASES)
def test_graphs_and_layers_have_the_same_kernel_times(case, on):
    cluster = cluster_from_text(on)
    kind = cluster.kinds[0]
    of_graph, of_layer = _of_graph(CASES[case], kind), _of_layer(CASES[case], kind, cluster)
    assert of_graph[0] == pytest.approx(of_layer[0], rel=0.03)
    # Attention over few tokens is limited by the memory, which layers do not look at.
    assert sum(of_graph) == pytest.approx(sum(of_layer), rel=0.03)


def test_many_rows_that_eight_does_not_divide_cost_what_their_number_says():
    def seconds(rows):
        with torch.device("meta"):
            model = nn.Linear(4096, 4096, bias=False).bfloat16()
            batch = torch.empty(rows, 4096, dtype=torch.bfloat16)
        graph = capture(model, batch, loss=lambda out: out.float().sum())
        return roofline_s(work_of(graph), cluster_from_text("1xh100").kinds[0]).sum()

    assert seconds(4095) == pytest.approx(seconds(4096), rel=0.01)


@pytest.mark.parametrize(("others", "rate"), [(0.0, "matrix_share"), (3.0, "mixed_share")])
def test_power_limits_products_that_fill_a_step(others, rate):
    chip = chip_of("h200-141g")
    limit = power_limit(1.0, others, chip)
    assert chip.mixed_share / limit == pytest.approx(getattr(chip, rate))
