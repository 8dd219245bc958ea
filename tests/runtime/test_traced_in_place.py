"""Models that reach their parameters in other ways than attributes train as plain PyTorch does, and
tracing leaves nothing behind in them."""

from __future__ import annotations

import copy
import functools
import gc
import random
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

import hocket
from hocket.capture.model import CaptureWarning
from hocket.runtime.strategies.placed import HookWarning

WIDTH = 8
SCALE = torch.linspace(0.5, 1.5, WIDTH)
CACHE: dict[int, torch.Tensor] = {}
SEEN: list[torch.Tensor] = []
MASK: torch.Tensor | None = None


@functools.lru_cache(maxsize=4)
def cached_scale(width: int) -> torch.Tensor:
    return torch.linspace(0.9, 1.1, width)


def global_mask() -> torch.Tensor:
    global MASK
    if MASK is None:
        MASK = torch.ones(WIDTH)
    return MASK


class Holder:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Layer(nn.Module):
    """Two linear layers; `call` says how the second one is reached."""

    shared: ClassVar[dict[str, torch.Tensor]] = {}
    latest = None

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.second = first, second
        self.kind, self.cache, self.table = kind, None, {}
        make = {
            "closure": lambda: lambda x: second(x),
            "closure of a parameter": lambda: (
                lambda x: x @ second.weight.T + functional.linear(x, weight, second.bias)
            ),
            "default": lambda: lambda x, inner=second: inner(x),
            "partial": lambda: functools.partial(Layer.apply_to, second),
            "partial of parameters": lambda: functools.partial(
                functional.linear, weight=second.weight, bias=second.bias
            ),
            "bound method": lambda: second.forward,
            "dict": lambda: {"inner": second},
            "list": lambda: [second, [second]],
            "tuple of parameters": lambda: (second.weight, second.bias),
            "object": lambda: SimpleNamespace(inner=[second.weight], module=second),
            "slots": lambda: Holder((second.weight, second)),
        }
        weight = second.weight
        self.held = make[kind]() if kind in make else None
        if kind == "hook":
            second.register_forward_hook(lambda module, args, out: SEEN.append(out))
        if kind == "frozen":
            first.requires_grad_(False)

    @staticmethod
    def apply_to(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.reached(self.norm(self.first(x)).relu())

    def reached(self, x: torch.Tensor) -> torch.Tensor:
        held: Any = self.held
        match self.kind:
            case "dict":
                return held["inner"](x)
            case "list":
                return held[0](x) + held[1][0](x)
            case "tuple of parameters":
                return functional.linear(x, *held)
            case "object":
                return held.module(x) + x @ held.inner[0]
            case "slots":
                return held.inner[1](x) + x @ held.inner[0]
            case "lazy attribute":
                if self.cache is None:
                    self.cache = torch.linspace(1, 2, WIDTH)
                return self.second(x) * self.cache
            case "lazy dict":
                if "scale" not in self.table:
                    self.table["scale"] = torch.linspace(1, 2, WIDTH)
                return self.second(x) * self.table["scale"]
            case "global tensor":
                return self.second(x) * SCALE
            case "global caches":
                CACHE.setdefault(WIDTH, torch.linspace(1, 3, WIDTH))
                self.shared.setdefault("s", torch.linspace(1, 3, WIDTH))
                Layer.latest = x
                both = CACHE[WIDTH] * self.shared["s"] * cached_scale(WIDTH)
                return self.second(x) * both * global_mask()
        return held(x) if callable(held) else self.second(x)


KINDS = (
    "closure", "closure of a parameter", "default", "partial", "partial of parameters",
    "bound method", "dict", "list", "tuple of parameters", "object", "slots", "lazy attribute",
    "lazy dict", "global tensor", "global caches", "hook", "frozen",
)  # fmt: skip


def built(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
    global MASK
    MASK = Layer.latest = None
    for each in (CACHE, SEEN, Layer.shared):
        each.clear()
    cached_scale.cache_clear()
    torch.manual_seed(0)
    model = nn.Sequential(Layer(kind), Layer(kind), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, [torch.randn(4, WIDTH) for _ in range(3)]


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def plainly_trained(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer, batches = built(kind)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = squares(model(batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def num_fake() -> int:
    gc.collect()
    # The type alone: `isinstance` reads ``__class__``, which fails for dead weak proxies.
    return sum(issubclass(type(each), FakeTensor) for each in gc.get_objects())


def state_of(model: nn.Module) -> Any:
    return [
        {name: copy.copy(value) for name, value in vars(module).items()}
        for module in model.modules()
    ]


@pytest.mark.parametrize(
    ("kind", "memory"),
    [(kind, None) for kind in KINDS]
    + [(kind, "7KiB") for kind in ("closure", "partial of parameters", "slots", "global caches")],
)
def test_parameters_are_trained_however_they_are_reached(kind: str, memory: str | None) -> None:
    losses, weights = plainly_trained(kind)
    model, optimizer, batches = built(kind)
    before = num_fake()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        is_told = pytest.warns(CaptureWarning, match="changes numbers or lists of its own")
        with is_told if kind == "hook" else nullcontext():
            train = hocket.prepare(model, optimizer, batches[0], loss=squares, memory=memory)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert num_fake() == before
    assert [train.step(batch).item() for batch in batches] == losses
    assert len(SEEN) == (6 if kind == "hook" else 0), "a hook that keeps something runs each time"
    train.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_hooks_that_only_run_while_a_step_is_traced_are_named() -> None:
    model, optimizer, batches = built("closure")
    model[0].second.register_forward_hook(lambda module, args, out: None)
    with pytest.warns(HookWarning, match=r"hooks of '0\.second'"):
        hocket.prepare(model, optimizer, batches[0], loss=squares)


@pytest.mark.parametrize("kind", ["hook", "global caches"])
def test_planning_leaves_a_model_as_it_was(kind: str) -> None:
    model, _, batches = built(kind)
    before, saved, drawn = num_fake(), state_of(model), (random.getstate(), np.random.get_state())
    hocket.auto(model, batches[0], on="2xv100-16g", loss=squares)
    assert num_fake() == before
    assert (SEEN, CACHE, Layer.shared, MASK) == ([], {}, {}, None)
    assert random.getstate() == drawn[0]
    assert np.array_equal(np.random.get_state()[1], drawn[1][1])
    for earlier, now in zip(saved, state_of(model), strict=True):
        assert earlier.keys() == now.keys()
        assert all(earlier[name] is now[name] or earlier[name] == now[name] for name in earlier)


class Unregistered(nn.Module):
    """Has a layer that no list of parameters knows."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, 1)
        self.hidden = [nn.Linear(WIDTH, WIDTH)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.hidden[0](x).relu())


def test_a_trained_tensor_that_is_not_the_models_makes_tracing_fall_back_to_modules() -> None:
    torch.manual_seed(0)
    model, batch = Unregistered(), torch.randn(4, WIDTH)
    own = copy.deepcopy(model)
    squares(own(batch)).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.warns(CaptureWarning, match="requires a gradient and is not the model's"):
        train = hocket.prepare(model, optimizer, batch, loss=squares)
    assert model.hidden[0].weight.grad is None
    train.step(batch)
    assert torch.equal(model.hidden[0].weight.grad, own.hidden[0].weight.grad)


def test_a_forward_that_refers_to_the_model_by_name_trains_it() -> None:
    model, optimizer, batches = built("closure")
    losses, _ = plainly_trained("closure")
    train = hocket.prepare(model, optimizer, batches[0], forward=lambda _, x: squares(model(x)))
    assert [train.step(batch).item() for batch in batches] == losses


def test_a_model_that_cannot_be_traced_is_left_as_it_was() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.last, self.kept = nn.Linear(WIDTH, 1), None, []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.own(x)
            self.kept.append(self.last)
            return self.last.mean() if self.last.sum().item() > 1e9 else -self.last.mean()

    model, before = Fails(), num_fake()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        hocket.prepare(model, torch.optim.SGD(model.parameters(), 0.1), torch.ones(2, WIDTH))
    assert (model.last, model.kept) == (None, [])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert num_fake() == before
