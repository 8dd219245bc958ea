"""Which calls draw random numbers is known by their arguments, and true of the generator."""

import pytest
import torch

from hocket.capture.describe import draws, may_draw

aten = torch.ops.aten
HEADS = tuple(torch.randn(1, 2, 4, 8) for _ in range(3))


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (aten._scaled_dot_product_flash_attention_for_cpu.default, HEADS, {}),
        (aten.bernoulli_.float, (torch.zeros(3),), {"p": 0.5}),
        (aten.native_dropout.default, (torch.ones(3), 0.5, True), {}),
        (aten.add.Tensor, (torch.ones(3), torch.ones(3)), {}),
    ],
)
def test_a_call_draws_where_the_generator_moves(function, args, kwargs):
    before = torch.get_rng_state()
    function(*args, **kwargs)
    assert draws(function, args, kwargs) == (not torch.equal(before, torch.get_rng_state()))


def test_fused_attention_draws_where_it_drops_and_never_in_its_backward_pass():
    fused = aten._scaled_dot_product_efficient_attention.default
    assert not draws(fused, (*HEADS, None, True), {})
    assert not draws(fused, (*HEADS, None, True, 0.0), {})
    assert draws(fused, (*HEADS, None, True, 0.1), {})
    assert draws(fused, (*HEADS, None, True), {"dropout_p": 0.1})
    assert not may_draw(aten._scaled_dot_product_efficient_attention_backward.default)
    assert not may_draw(aten._scaled_dot_product_cudnn_attention_backward.default)


def test_recurrent_layers_draw_where_they_drop():
    function = aten._cudnn_rnn.default
    names = [argument.name for argument in function._schema.arguments]
    for dropout in (0.0, 0.5):
        args = [dropout if name == "dropout" else None for name in names]
        assert draws(function, args, {}) == bool(dropout)
