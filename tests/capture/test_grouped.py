"""Products of rows that are sorted by expert, on tensors without memory."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from hocket.capture.fake import fake_mode
from hocket.capture.model import CaptureWarning, capture
from hocket.graph.graph import Phase

SHAPES = {
    "rows of each expert": ((16, 8), (3, 8, 24), True),
    "gradients of matrices": ((8, 16), (16, 24), True),
    "columns of each expert": ((3, 4, 8), (8, 16), True),
    "a batch": ((3, 4, 8), (3, 8, 24), False),
}


def product(first, second, is_grouped, dtype):
    offsets = torch.tensor([4, 8, 16], dtype=torch.int32) if is_grouped else None
    made = functional.grouped_mm(
        torch.ones(first, dtype=dtype), torch.ones(second, dtype=dtype), offs=offsets
    )
    return made.shape, made.stride(), made.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_products_are_laid_out_as_the_real_ones(name, dtype):
    first, second, is_grouped = SHAPES[name]
    real = product(first, second, is_grouped, dtype)
    with fake_mode(nn.Identity()):
        assert product(first, second, is_grouped, dtype) == real


class Experts(nn.Module):
    """Each row goes to the expert that likes it most."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.matrices = nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        order = chosen.argsort()
        offsets = functional.one_hot(chosen, 3).sum(0).cumsum(0).to(torch.int32)
        return functional.grouped_mm(x[order], self.matrices, offs=offsets).square().mean()


def test_a_mixture_of_experts_in_float32_is_recorded():
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        graph = capture(Experts(), torch.randn(12, 8))
    kinds = [graph.kind_of(op) for op in range(graph.num_ops)]
    passes = [graph.op_phase[op] for op, kind in enumerate(kinds) if "grouped_mm" in kind]
    assert set(passes) == {Phase.FORWARD, Phase.BACKWARD}
