"""A person's own function that makes a model, looked at as text.

What is wrong with its name or its parameters is told before the seconds that importing PyTorch and
the file take. Whatever the text does not settle is left to the import.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hocket.cli.sources import ModelOptions

_PARAMETERS = ("batch", "seq", "dtype", "layers")


def refuse_wrong_file(text: str, options: ModelOptions) -> None:
    """Tell of a file that is not there, of a function that is not named or not there, and of an
    option that it has no parameter for."""
    from hocket.base.errors import UsageError, did_you_mean
    from hocket.base.regular import is_file

    file, function = (text, "") if text.endswith(".py") else text.rpartition(":")[::2]
    if not file.endswith(".py"):
        return
    if not is_file(Path(file)):
        raise UsageError(
            f"there is no file {file!r}", hint="write path/file.py:function, and check the path"
        )
    tree = _parsed(Path(file))
    defined = [] if tree is None else [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    names = [each.name for each in defined if not each.name.startswith("_")]
    if not function:
        known = ", ".join(names[:8]) or "it has none yet"
        raise UsageError(
            f"{text!r} names no function",
            hint=f"write {file}:FUNCTION, one that returns the model and a batch ({known})",
        )
    if tree is None:
        return
    if function not in _bound(tree) and not _binds_unseen(tree):
        raise UsageError(
            f"{file!r} has no function {function!r}", hint=did_you_mean(function, names)
        )
    found = [each for each in defined if each.name == function]
    if len(found) == 1 and not found[0].decorator_list and found[0].args.kwarg is None:
        _refuse_options(found[0], options)


def _refuse_options(function: ast.FunctionDef, options: ModelOptions) -> None:
    from hocket.base.errors import UsageError

    named = {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
    for key in _PARAMETERS:
        if getattr(options, key) is not None and key not in named:
            raise UsageError(
                f"{function.name!r} has no parameter {key!r}",
                hint=f"add {key!r} to its parameters or leave the option out",
            )


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return None


def _bound(tree: ast.Module) -> set[str]:
    """Every name that some line of the file gives a meaning."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name.partition(".")[0])
    return found


def _binds_unseen(tree: ast.Module) -> bool:
    """Whether names may come from elsewhere: ``from … import *``, ``__getattr__``, ``globals()``,
    ``exec``."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    bound = _bound(tree)
    return bool({"*", "__getattr__"} & bound or {"globals", "vars", "exec", "setattr"} & used)
