"""A graph captured for an accelerator runs on a processor and gives what the model gives there."""

import pytest
import torch
from runtime.plain_reference import reference_steps
from runtime.small_zoo import SMALL_ZOO
from runtime.test_single import place, run_single
from torch import nn

from hocket.capture.zoo import language
from hocket.runtime.cpu_attention import _backward, _forward

MODELS = {
    "gpt2": lambda: language.gpt2(
        2, 8, n_layer=2, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "llama-1b": SMALL_ZOO["llama-1b"],
    "vit-base": SMALL_ZOO["vit-base"],
    "moe-12x32": SMALL_ZOO["moe-12x32"],
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_accelerator_graph_equals_the_model_on_a_processor(name):
    torch.manual_seed(2)
    model, batch = MODELS[name]()
    model.train()
    setup = place(model, batch, seed=4, device="accelerator")
    kinds = {call.cost.kind for call in setup.program.calls}
    # Where heads share keys, float32 attention writes its scores on a GPU.
    is_fused = "aten._scaled_dot_product_efficient_attention_backward" in kinds
    assert is_fused == (name != "llama-1b")
    process, records = run_single(setup, model, batch, 2)
    reference = reference_steps(model, batch, steps=2, seed=5)
    for record, loss in zip(records, reference.losses, strict=True):
        assert record.loss == pytest.approx(loss, rel=1e-6)
    results = process.results()
    for parameter, gradient in setup.program.gradients.items():
        expected = reference.gradients[setup.program.names[parameter]]
        error = (results[gradient] - expected).norm() / expected.norm()
        assert error < 1e-6, setup.program.names[parameter]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_attention_and_its_gradients_follow_the_formula(is_causal, has_bias, dropout_p):
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)
    )
    bias = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True) if has_bias else None
    plain = [t.detach() for t in (query, key, value)]
    plain_bias = bias.detach() if bias is not None else None
    output, log_sum, seed, offset = _forward(*plain, plain_bias, True, dropout_p, is_causal)
    scores = query @ key.transpose(-2, -1) / 2
    if bias is not None:
        scores = scores + bias
    if is_causal:
        scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
    weights = torch.softmax(scores, -1)
    if dropout_p:
        torch.default_generator.set_state(seed)
        weights = weights * torch.empty_like(weights).bernoulli_(1 - dropout_p) / (1 - dropout_p)
    expected = weights @ value
    torch.testing.assert_close(output, expected.detach())
    gradient = torch.randn_like(output)
    expected.backward(gradient)
    wanted = [True, True, True, has_bias]
    found = _backward(gradient, *plain, plain_bias, output, log_sum, seed, offset, dropout_p,
                      wanted, is_causal)  # fmt: skip
    leaves = [query, key, value] + ([bias] if bias is not None else [])
    for result, leaf in zip(found, leaves, strict=False):
        torch.testing.assert_close(result, leaf.grad)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_attention_draws_what_the_model_draws_on_a_processor(dropout_p):
    query, key, value = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    torch.manual_seed(1)
    torch.rand(7)
    begun = torch.get_rng_state()
    expected = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p)
    after = torch.get_rng_state()
    assert torch.equal(begun, after) == (not dropout_p)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    plain = [t.detach() for t in (query, key, value)]
    torch.set_rng_state(begun)
    output, log_sum, seed, offset = _forward(*plain, None, True, dropout_p)
    assert torch.equal(output, expected)
    assert torch.equal(torch.get_rng_state(), after)
    found = _backward(gradient, *plain, None, output, log_sum, seed, offset, dropout_p,
                      [True, True, True, False])  # fmt: skip
    assert torch.equal(torch.get_rng_state(), after)
    assert all(torch.equal(a, b.grad) for a, b in zip(found, (query, key, value), strict=False))


def test_a_seed_of_attention_that_is_sent_gives_the_same_mask():
    plain = [torch.randn(2, 3, 5, 4) for _ in range(3)]
    for begin in (lambda: torch.manual_seed(1), lambda: torch.rand(1)):
        begin()
        output, _, seed, _ = _forward(*plain, None, True, 0.3, stays=False)
        assert seed.dtype == torch.int64
        torch.manual_seed(int(seed))
        expected = nn.functional.scaled_dot_product_attention(*plain, dropout_p=0.3)
        assert torch.equal(output, expected)
        # One that begins anew twice would drop the same.
        assert not torch.equal(_forward(*plain, None, True, 0.3, stays=False)[2], seed)


def test_dropout_of_attention_is_the_same_on_every_placement():
    torch.manual_seed(2)
    model, batch = SMALL_ZOO["gpt2"]()
    model.train()
    losses = []
    for seed in (0, 1):
        setup = place(model, batch, seed=seed, device="accelerator")
        losses.append([r.loss for r in run_single(setup, model, batch, 3)[1]])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3
