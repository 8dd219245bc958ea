"""Following calls: pure library functions, methods of arrays, and plain helpers.

A helper is read with the actual arguments, so what it reads and writes is seen at the caller's
arrays. A call that is not known to be without effect is refused.
"""

from __future__ import annotations

import ast

from hocket.loops.calls import VIEW_METHODS, WRITE_METHODS, pure_call, pure_method
from hocket.loops.expressions import Environment, Expressions, not_understood, opaque
from hocket.loops.flow import stored_names
from hocket.loops.form import FRESH, UNKNOWN, Array, Refusal, Scalar, Value
from hocket.loops.names import Helper
from hocket.loops.numbers import known_before, merged, views_in

_MAX_CALL_DEPTH = 8


class Calls(Expressions):
    """Expressions with their calls."""

    def call(self, node: ast.Call, environment: Environment) -> Value:
        """Pure library functions, methods of arrays, plain helpers."""
        keywords = {keyword.arg or "**" for keyword in node.keywords}
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            raise not_understood(node)
        root = node.func
        while isinstance(root, ast.Attribute):
            root = root.value
        is_local = isinstance(root, ast.Name) and (
            root.id in environment or (not self.call_depth and root.id in self.scope.arrays)
        )
        path = None if is_local else self.library(node.func)
        if path is None and isinstance(node.func, ast.Attribute):
            return self.method(node, keywords, environment)
        if path is None and isinstance(node.func, ast.Name) and not is_local:
            meaning = self.names.meaning(node.func.id)
            if isinstance(meaning, Helper) and not keywords:
                return self.helper(meaning, node, environment)
        pure = pure_call(path, len(node.args), keywords) if path else None
        if pure is None:
            raise Refusal(_impure(ast.unparse(node), node.lineno), node.lineno)
        values = [self.value(argument, environment) for argument in node.args]
        if path == "builtins.len" and isinstance(values[0], Array):
            return self.length(ast.unparse(node), values[0])
        numbers = [self.consume(value, node) for value in values]
        if pure[0] == "fresh" or (pure[0] == "elementwise" and any(map(views_in, values))):
            return FRESH
        if path == "builtins.int" and len(numbers) == 1 and numbers[0].kind == "int":
            return numbers[0]
        if path in ("builtins.min", "builtins.max", "builtins.abs"):
            texts = [number.text for number in numbers]
            found = merged([Scalar(None, None, number.kind) for number in numbers])
            if path != "builtins.abs" and len(texts) > 1 and None not in texts:
                text = f"{path.partition('.')[2]}({', '.join(map(str, texts))})"
                return known_before(text, self.consume(found, node).kind, self.dims)
            return found
        return Scalar(None, None, pure[1])

    def method(self, node: ast.Call, keywords: set[str], environment: Environment) -> Value:
        """A method of an array."""
        assert isinstance(node.func, ast.Attribute)
        base, name = self.value(node.func.value, environment), node.func.attr
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
        raise Refusal(_impure(ast.unparse(node), node.lineno), node.lineno)

    def helper(self, helper: Helper, node: ast.Call, environment: Environment) -> Value:
        """Follow a call with its actual arguments, so that what it writes is seen."""
        parameters = helper.node.args
        plain = [argument.arg for argument in parameters.args]
        is_plain = not (parameters.vararg or parameters.kwarg or parameters.kwonlyargs)
        if not is_plain or len(plain) != len(node.args) or self.call_depth >= _MAX_CALL_DEPTH:
            raise Refusal(
                f"call of {helper.name} at line {node.lineno} is not understood: "
                "give every argument by position, and do not recurse",
                node.lineno,
            )
        frame: Environment = {
            name: self.value(argument, environment)
            for name, argument in zip(plain, node.args, strict=True)
        }
        for name in stored_names(helper.node.body):
            frame.setdefault(name, UNKNOWN)
        kept = self.names, self.returns, self.loop_depth
        self.names, self.returns, self.loop_depth = helper.names, [], 0
        self.call_depth += 1
        self.block(helper.node.body, frame)
        self.call_depth -= 1
        returned = self.returns
        self.names, self.returns, self.loop_depth = kept
        return merged(returned) if returned else UNKNOWN


def _impure(text: str, line: int) -> str:
    if "random" in text or "rng" in text:
        return f"{text} at line {line} draws from a state that all iterations share"
    return f"call {text} at line {line} may have side effects"
