"""Modules that are computed again see the same arguments both times."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hocket.runtime.memory.again import computed_again


@pytest.mark.parametrize("names", [(), ("value",), ("key", "value")])
def test_what_was_one_tensor_is_one_when_it_is_computed_again(names):
    """Attention multiplies once where query, key and value are one tensor, else three times."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    twin, rows = copy.deepcopy(attention), torch.randn(3, 4, 8)
    made = rows.clone().requires_grad_() * 2  # as what a block before it has made
    args, kwargs = [made] * (3 - len(names)), dict.fromkeys(names, made)
    with saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.clone):
        result, _ = computed_again([attention], attention, args, {"need_weights": False, **kwargs})
    result.square().sum().backward()
    twin(*[rows * 2] * 3, need_weights=False)[0].square().sum().backward()
    for ours, plain in zip(attention.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, plain.grad)
