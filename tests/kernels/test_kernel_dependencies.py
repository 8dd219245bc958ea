"""Whatever enters a compiled form is part of its key: every kernel, each of its dependencies."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest

import hocket
from hocket.kernels import Kernel, kernel
from hocket.simulate.events import end_flow
from hocket.simulate.state import Flow

SOURCES = Path(hocket.__file__).parent


@functools.cache
def all_kernels() -> dict[str, Kernel]:
    """Every kernel of the project, found by importing what imports the decorator."""
    found = {}
    for path in sorted(SOURCES.rglob("*.py")):
        if "from hocket.kernels import" not in path.read_text():
            continue
        name = ".".join(("hocket", *path.relative_to(SOURCES).with_suffix("").parts))
        for key, value in vars(importlib.import_module(name.removesuffix(".__init__"))).items():
            if isinstance(value, Kernel):
                found.setdefault(f"{value.function.__module__}.{key}", value)
    return found


@functools.cache
def text_of(function: FunctionType) -> str:
    return textwrap.dedent(inspect.getsource(function))


def tree_of(function: FunctionType) -> ast.FunctionDef:
    tree = ast.parse(text_of(function)).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree


def names_of(function: FunctionType) -> set[str]:
    """Names of the module that a function reads, by its text."""
    tree = tree_of(function)
    read = {
        node.id
        for statement in tree.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    own = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    } | {argument.arg for argument in tree.args.args}
    return {name for name in read - own if not hasattr(builtins, name)}


def tuples_of(hint: Any) -> Iterator[type]:
    """Named tuples of a type, with those inside."""
    if isinstance(hint, type) and hasattr(hint, "_fields"):
        yield hint
        for part in inspect.get_annotations(hint, eval_str=True).values():
            yield from tuples_of(getattr(part, "__forward_value__", part))


def changed_function(function: FunctionType) -> FunctionType:
    """The function with one more statement."""
    tree = tree_of(function)
    tree.decorator_list = []
    tree.body.insert(0, ast.parse("changed = 1").body[0])
    code = compile(ast.fix_missing_locations(ast.Module([tree], [])), "changed", "exec")
    names = dict(function.__globals__)
    exec(code, names)
    changed = names[tree.name]
    return FunctionType(changed.__code__, function.__globals__, function.__name__)


def changed_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return (changed_value(value[0]), *value[1:])
    if isinstance(value, bool | np.bool_):
        return not value
    if isinstance(value, str):
        return value + "changed"
    if value == np.inf:
        return 1.0
    if value + 1 == value:  # too large for the difference
        return value / 2
    return type(value)(value + 1) if isinstance(value, np.generic) else value + 1


def dependencies_of(each: Kernel) -> Iterator[tuple[str, Any]]:
    """What a kernel names or takes, and the change to make: (target, attribute, new value)."""
    function = each.function
    for name in sorted(names_of(function)):
        value = function.__globals__[name]
        if isinstance(value, Kernel):
            yield name, (value, "function", changed_function(value.function))
        elif isinstance(value, type) and hasattr(value, "_fields"):
            yield name, (value, "_fields", value._fields[::-1])
        elif isinstance(value, bool | int | float | tuple | str | np.generic | np.ndarray):
            yield name, (function.__globals__, name, changed_value(value))
        else:
            assert value.__name__.partition(".")[0] in ("math", "numpy"), (name, value)
    for parameter, hint in inspect.get_annotations(function, eval_str=True).items():
        for taken in tuples_of(hint):
            fields = taken._fields  # type: ignore[attr-defined]
            swapped = fields[::-1] if len(fields) > 1 else (f"other_{fields[0]}",)
            yield f"{parameter}: {taken.__name__}", (taken, "_fields", swapped)


def digest_after(each: Kernel, change: tuple[Any, str, Any]) -> str:
    target, name, value = change
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(target, dict):
            patch.setitem(target, name, value)
        else:
            patch.setattr(target, name, value)
        return each.digest


def test_the_key_of_every_kernel_changes_with_each_dependency() -> None:
    kernels = all_kernels()
    assert len(kernels) > 300
    num_changes, stale = 0, []
    for name, each in kernels.items():
        before = each.digest
        for what, change in dependencies_of(each):
            num_changes += 1
            if digest_after(each, change) == before:
                stale.append(f"{name}: {what}")
        if digest_after(each, (each, "function", changed_function(each.function))) == before:
            stale.append(name)
        assert each.digest == before
    assert stale == []
    assert num_changes > 1000


def test_the_key_of_a_kernel_changes_with_what_its_callees_use() -> None:
    from hocket.simulate.events import run

    each: Any = run
    reached, todo = {}, [each]
    while todo:
        for what, change in dependencies_of(todo.pop()):
            callee = change[0]
            if (id(callee), what) not in reached:
                reached[id(callee), what] = change
                todo += [callee] if isinstance(callee, Kernel) else []
    assert len(reached) > 40
    before = each.digest
    for (_, what), change in reached.items():
        assert digest_after(each, change) != before, what


def test_swapped_fields_of_a_table_make_another_kernel(monkeypatch) -> None:
    each: Any = end_flow
    before = each.digest
    fields = list(Flow._fields)
    fields[0], fields[1] = fields[1], fields[0]
    monkeypatch.setattr(Flow, "_fields", tuple(fields))
    assert each.digest != before


def test_comments_and_places_do_not_change_the_key() -> None:
    texts = (
        "def same(value: int) -> int:\n    return value + 1\n",
        "# moved\n\n\ndef same(value: int) -> int:\n    # said\n    return value + 1\n",
        "def same(value: int) -> int:\n    return value + 2\n",
    )
    digests = []
    for text in texts:
        names: dict[str, Any] = {"__name__": "somewhere"}
        exec(text, names)
        digests.append(kernel(names["same"]).digest)
    assert digests[0] == digests[1] != digests[2]


def test_what_compiled_code_cannot_contain_is_refused() -> None:
    table = {"one": 1}

    @kernel
    def look_up() -> int:
        return table["one"]

    with pytest.raises(TypeError, match=r"compiled code cannot use 'table', which .*look_up uses"):
        _ = look_up.digest  # type: ignore[attr-defined]
