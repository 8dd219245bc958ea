"""Evaluate calls symbolically: pure library functions, array methods and plain helper functions.

The body of a helper is read with the actual arguments, so its accesses are recorded for the
caller's arrays. A call that is not known to be free of side effects is refused, because it may have
hidden state, such as a random generator, or write into its arguments.
"""

from __future__ import annotations

import ast
import math
from typing import Literal

import numpy as np

from hocket.loops.expressions import (
    Environment,
    Expressions,
    merged,
    not_understood,
    opaque,
    views_in,
)
from hocket.loops.flow import stored_names
from hocket.loops.form import FRESH, UNKNOWN, Array, Kind, Refusal, Scalar, Value
from hocket.loops.names import Helper

Result = Literal["scalar", "elementwise", "fresh"]

_BUILTINS: dict[str, Kind] = {
    "abs": "unknown", "min": "unknown", "max": "unknown", "pow": "unknown", "int": "int",
    "float": "float", "bool": "bool", "len": "int", "round": "unknown",
}  # fmt: skip
# Maximum number of positional arguments; one more would be an output array (``out``).
_REDUCERS = {
    "sum": 2, "dot": 2, "vdot": 2, "inner": 2, "mean": 2, "max": 2, "min": 2, "amax": 2, "amin": 2,
    "argmax": 2, "argmin": 2, "prod": 2, "any": 1, "all": 1, "std": 1, "var": 1, "searchsorted": 2,
    "median": 1, "count_nonzero": 1, "linalg.norm": 1, "linalg.det": 1,
}  # fmt: skip
_FRESH = {
    "zeros": 2, "ones": 2, "empty": 2, "full": 3, "zeros_like": 2, "ones_like": 2, "empty_like": 2,
    "full_like": 3, "arange": 3, "linspace": 3, "array": 2, "copy": 1, "outer": 2, "cumsum": 1,
    "where": 3, "concatenate": 1, "linalg.solve": 2, "linalg.inv": 1, "sort": 1, "argsort": 1,
    "clip": 3, "round": 2, "diag": 1, "eye": 2,
}  # fmt: skip
_SCALAR_METHODS = (
    "sum", "mean", "max", "min", "argmax", "argmin", "prod", "any", "all", "std", "var", "item",
)  # fmt: skip
_FRESH_METHODS = ("dot", "copy", "astype", "flatten", "cumsum")
VIEW_METHODS = frozenset({"reshape", "ravel", "transpose", "view", "swapaxes"})
WRITE_METHODS = frozenset({"fill", "sort"})
_KEYWORDS = frozenset({"dtype", "axis", "shape", "fill_value"})
# Also ends the reading of helpers that call themselves.
_MAX_CALL_DEPTH = 8


def pure_call(path: str, num_args: int, keywords: set[str]) -> tuple[Result, Kind] | None:
    """Symbolic result of a library function; None if it is not known to be free of side effects."""
    module, _, name = path.partition(".")
    if module == "builtins" and name in _BUILTINS and not keywords:
        return "elementwise", _BUILTINS[name]
    if module == "math" and callable(getattr(math, name, None)) and not keywords:
        is_whole = name in ("floor", "ceil", "trunc", "gcd", "comb")
        return "scalar", "int" if is_whole else "float"
    # Other keywords, such as ``out`` and ``where``, make a function write into an argument.
    if module != "numpy" or not keywords <= _KEYWORDS:
        return None
    found = getattr(np, name, None)
    if isinstance(found, np.ufunc):
        return ("elementwise", "unknown") if num_args == found.nin and found.nout == 1 else None
    if isinstance(found, type) and issubclass(found, np.generic):
        return "elementwise", "int" if issubclass(found, np.integer) else "unknown"
    if 1 <= num_args <= _REDUCERS.get(name, 0):
        return ("fresh" if num_args == 2 and name not in ("dot", "vdot") else "scalar"), "unknown"
    return ("fresh", "unknown") if num_args <= _FRESH.get(name, -1) else None


def pure_method(name: str, num_args: int, keywords: set[str]) -> Result | None:
    """Symbolic result of an array method; None if it is not known to be free of side effects."""
    if not keywords <= _KEYWORDS:
        return None
    if name in _SCALAR_METHODS:
        return "fresh" if num_args and name != "item" else "scalar"
    return "fresh" if name in _FRESH_METHODS else None


class Calls(Expressions):
    """Reader of expressions that also evaluates calls."""

    def call(self, node: ast.Call, environment: Environment) -> Value:
        """Value of a call of a pure library function, an array method or a plain helper."""
        keywords = {keyword.arg or "**" for keyword in node.keywords}
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            raise not_understood(node)
        path = self.names.library(node.func)
        if path is None and isinstance(node.func, ast.Attribute):
            return self.method(node, node.func, keywords, environment)
        if path is None and isinstance(node.func, ast.Name):
            meaning = self.names.meaning(node.func.id)
            if isinstance(meaning, Helper) and not keywords:
                return self.helper(meaning, node, environment)
        pure = pure_call(path, len(node.args), keywords) if path else None
        if pure is None:
            raise _impure(node)
        values = [self.value(argument, environment) for argument in node.args]
        if path == "builtins.len" and isinstance(values[0], Array):
            return self.length(ast.unparse(node), values[0])
        numbers = [self.consume(value, node) for value in values]
        if pure[0] == "fresh" or (pure[0] == "elementwise" and any(map(views_in, values))):
            return FRESH
        # int() of an integer returns the number itself, so an index keeps its linear form.
        if path == "builtins.int" and len(numbers) == 1 and numbers[0].kind == "int":
            return numbers[0]
        if path in ("builtins.min", "builtins.max", "builtins.abs"):
            texts = [number.text for number in numbers]
            kinds = [Scalar(None, None, number.kind) for number in numbers]
            found = self.consume(merged(kinds), node)
            if path != "builtins.abs" and len(texts) > 1 and None not in texts:
                text = f"{path.partition('.')[2]}({', '.join(map(str, texts))})"
                return self.known_before(text, found.kind)
            return found
        return Scalar(None, None, pure[1])

    def method(
        self, node: ast.Call, function: ast.Attribute, keywords: set[str], environment: Environment
    ) -> Value:
        """Value of a method call, such as ``array.sum()``."""
        base, name = self.value(function.value, environment), function.attr
        for argument in node.args:
            self.consume(self.value(argument, environment), node)
        if isinstance(base, Array):
            if name in VIEW_METHODS:
                return opaque(base)
            if name in WRITE_METHODS and not keywords:
                self.touch(base, "write", node)
                return UNKNOWN
            result = pure_method(name, len(node.args), keywords)
            if result is not None:
                self.consume(base, node)
                return FRESH if result == "fresh" else UNKNOWN
        raise _impure(node)

    def helper(self, helper: Helper, node: ast.Call, environment: Environment) -> Value:
        """Read a helper's body with the actual arguments, so that its writes are recorded."""
        parameters = helper.node.args
        plain = [argument.arg for argument in parameters.args]
        is_plain = not (parameters.vararg or parameters.kwarg or parameters.kwonlyargs)
        if not is_plain or len(plain) != len(node.args) or self.call_depth >= _MAX_CALL_DEPTH:
            raise Refusal(
                f"call of {helper.name} at line {node.lineno} is not understood: "
                "give every argument by position, and do not recurse",
                node.lineno,
            )
        # A local variable that some branch leaves unbound must not be mistaken for a global of that
        # name.
        frame: Environment = dict.fromkeys(stored_names(helper.node.body), UNKNOWN)
        for name, argument in zip(plain, node.args, strict=True):
            frame[name] = self.value(argument, environment)
        kept = self.names, self.returns, self.loop_depth
        # ``break`` and ``return`` in a helper only leave the helper, not the loop that calls it.
        self.names, self.returns, self.loop_depth = helper.names, [], 0
        self.call_depth += 1
        self.block(helper.node.body, frame)
        self.call_depth -= 1
        returned = self.returns
        self.names, self.returns, self.loop_depth = kept
        return merged(returned) if returned else UNKNOWN


def _impure(node: ast.Call) -> Refusal:
    text, line = ast.unparse(node), node.lineno
    if "random" in text or "rng" in text:
        return Refusal(f"{text} at line {line} draws from a state that all iterations share", line)
    return Refusal(f"call {text} at line {line} may have side effects", line)
