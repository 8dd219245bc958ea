"""Tracing leaves objects of users alone: it calls none of their methods, and takes nothing."""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from collections import OrderedDict, UserDict, deque
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.capture import UntraceableError

WIDTH = 4
CALLS: list[str] = []
"""Methods of `CALLED` objects that somebody called."""


def noting(base: type, *names: str) -> type:
    """A subclass whose methods of these names are noted and refuse to work."""

    def method(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            CALLS.append(f"{base.__name__}.{name}")
            raise AssertionError(f"{base.__name__}.{name} was called")

        return call

    return type(f"Own{base.__name__}", (base,), {name: method(name) for name in names})


READS = ("__iter__", "__getitem__", "keys", "values", "items", "copy", "get", "__copy__")
WRITES = ("__setitem__", "__delitem__", "clear", "update", "pop", "extend", "add", "append")
COPIES = ("__deepcopy__", "__reduce_ex__", "__getstate__", "__eq__", "__bool__", "__len__")


class Lazy:
    """An object that computes its attributes, its class and its dict."""

    __slots__ = ("_inner",)

    def __getattribute__(self, name: str) -> Any:
        CALLS.append(f"Lazy.{name}")
        raise RuntimeError("no context")


class Computed:
    @property
    def loaded(self) -> Any:
        CALLS.append("Computed.loaded")
        raise RuntimeError("not connected")

    def __getattr__(self, name: str) -> Any:
        CALLS.append(f"Computed.{name}")
        raise AttributeError(name)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        CALLS.append("Computed.__eq__")
        return False

    def __deepcopy__(self, memo: Any) -> Any:
        CALLS.append("Computed.__deepcopy__")
        raise RuntimeError("cannot be copied")


def _dead_proxy() -> Any:
    return weakref.proxy(nn.Linear(1, 1))


def _filled(kind: type, *items: Any) -> Any:
    made = kind.__new__(kind)
    base = next(b for b in (OrderedDict, dict, list, set, deque) if issubclass(kind, b))
    base.__init__(made)
    for item in items:
        if issubclass(base, dict):
            base.__setitem__(made, f"key {len(items)}", item)
        else:
            (base.add if base is set else base.append)(made, item)
    return made


OBJECTS = {
    "mapping": lambda p: _filled(noting(dict, *READS, *WRITES, *COPIES), p, 3),
    "ordered mapping": lambda p: _filled(noting(OrderedDict, *READS, *WRITES, *COPIES), p),
    "list": lambda p: _filled(noting(list, *READS, *WRITES, *COPIES), p, "text"),
    "set": lambda p: _filled(noting(set, *READS, *WRITES, *COPIES), 1, "two"),
    "deque": lambda p: _filled(noting(deque, *READS, *WRITES, *COPIES), p),
    "lazy": lambda p: object.__new__(Lazy),
    "computed": lambda p: Computed(),
    "weak reference": lambda p: weakref.ref(p),
    "proxy": lambda p: weakref.proxy(p),
    "dead proxy": lambda p: _dead_proxy(),
    "weak values": lambda p: weakref.WeakValueDictionary({"p": p}),
    "user dict": lambda p: UserDict({"p": p}),
}


class Model(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        # In containers: `nn.Module` itself looks at what is given to an attribute.
        held = make(self.linear.weight)
        self.held = [(held,), {"held": held}]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("memory", [None, "1GiB"])
def test_objects_of_users_are_not_called(name, memory):
    torch.manual_seed(0)
    model, x = Model(OBJECTS[name]), torch.randn(3, WIDTH)
    held = model.held[0][0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {} if memory is None else {"memory": memory}
    CALLS.clear()
    train = hocket.prepare(model, optimizer, x, **options)
    losses = [train.step(x).item() for _ in range(3)]
    assert not CALLS
    assert model.held[0][0] is model.held[1]["held"] is held
    assert losses == plain_losses(Model(lambda p: None), x)


def plain_losses(model: nn.Module, x: torch.Tensor) -> list[float]:
    torch.manual_seed(0)
    fresh = copy.deepcopy(model)
    for module in fresh.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = fresh(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Scaled(nn.Module):
    """A model that takes a number from an iterator in each step."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear, self.numbers = nn.Linear(WIDTH, 1), make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * next(self.numbers)).square().mean()


@pytest.mark.parametrize(
    "make",
    [
        lambda: itertools.count(1),
        lambda: iter([0.5, 1.5, 2.5, 3.5, 4.5, 5.5]),
        lambda: (0.5 + k for k in range(6)),
        lambda: map(float, range(1, 9)),
    ],
    ids=["count", "list", "generator", "map"],
)
def test_items_of_iterators_are_left_for_the_steps(make):
    x = torch.randn(3, WIDTH)
    found = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = Scaled(make)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = None
        if not is_plain:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with pytest.raises(UntraceableError, match="iterator"):
                    hocket.prepare(model, optimizer, x)
                train = hocket.prepare(model, optimizer, x, memory="1GiB")
        found += three_losses(model, optimizer, x, train)
    assert found[:3] == found[3:]


def three_losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, train: Any
) -> list[float]:
    """Losses of three steps, by plain PyTorch where ``train`` is None."""
    losses = []
    for _ in range(3):
        if train is None:
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
        else:
            loss = train.step(x)
        losses.append(loss.item())
    return losses


class Masked(nn.Module):
    """A transformer whose mask is made of constants; torch reads whether it is causal."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.kind, self.mask = kind, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[1]
        if self.kind == "causal":
            mask = nn.Transformer.generate_square_subsequent_mask(size, device=x.device)
        elif self.kind == "wider":
            mask = torch.ones(size, size).tril(1).log()
        else:
            if self.mask is None or self.mask.shape[0] != size:
                self.mask = torch.ones(size, size).tril().log()
            mask = self.mask
        return self.encoder(x, mask=mask).square().mean()


@pytest.mark.parametrize("kind", ["causal", "wider", "cached"])
def test_masks_made_of_constants_are_read_while_tracing(kind):
    x, found = torch.randn(2, 6, 8), []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = Masked(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = None if is_plain else hocket.prepare(model, optimizer, x)
        torch.manual_seed(1)
        found += three_losses(model, optimizer, x, train)
    assert found[:3] == found[3:]
    assert not train.lost


class Log:
    """An object of a library that holds a file, as loggers and progress bars do."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.lines = itertools.count()


def test_files_of_the_model_stay_in_place(tmp_path: Any) -> None:
    class Logging(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.log.file.write("step\n")
            return super().forward(x)

    with (tmp_path / "log").open("w") as file:
        model = Logging(WIDTH, WIDTH)
        model.log = Log(file)
        lines = model.log.lines
        train = hocket.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.ones(2, WIDTH),
            forward=lambda model, x: model(x).sum(),
        )
        train.step(torch.ones(2, WIDTH))
        assert model.log.file is file
        assert model.log.lines is lines
