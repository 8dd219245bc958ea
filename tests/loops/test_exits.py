"""Every way out of a loop gives what plain Python gives: compiled, and in generated programs."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import textwrap
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loops.harness import python_kernel

import hocket
from hocket.loops import job, runner

_NUMBER = itertools.count()


@dataclass(frozen=True)
class Text:
    """The source of a kernel."""

    text: str


def function_of(text):
    """A function defined by a text, with a source that can be read."""
    name = f"<generated {next(_NUMBER)}>"
    text = textwrap.dedent(text)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space = {"np": np, "contextlib": contextlib}
    exec(compile(text, name, "exec"), space)
    return space["f"]


def outcome(function, a, n):
    """What a call returns or raises, and what it leaves in its array."""
    a = a.copy()
    try:
        found = function(a, n)
        if hasattr(found, "__next__"):
            found = list(found)
    except Exception as error:
        found = type(error), error.args
    return repr(_plain(found)), a.tobytes()


def _plain(value):
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(part) for part in value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value


def check(text, compiled=True):
    plain, decorated = function_of(text), hocket.parallel_for(workers=2)(function_of(text))
    for n in (0, 1, 5, 8):
        for a in (np.arange(8.0), np.array([4.0, -1, 0, 7, 7, 2, -3, 9])):
            with contextlib.ExitStack() as stack:
                if not compiled:
                    patch = stack.enter_context(pytest.MonkeyPatch.context())
                    kernel = lambda text, options: python_kernel(Text(text))  # noqa: E731
                    for module in (runner, job):
                        patch.setattr(module, "compiled", kernel)
                found = outcome(decorated, a, n)
            assert found == outcome(plain, a, n), text
    return decorated


EXITS = {
    "bare": "return",
    "none": "return None",
    "number": "return i",
    "constant": "return True",
    "pair": "return (100, 200)",
    "swapped": "return s, i",
    "expression": "return s * 2 + i if s > 3 else 'none'",
    "element": "return a[i]",
    "array": "return a[i:]",
    "row": "return x",
    "call": "return sorted({i: 1, n: 2}), np.sum(a), [j for j in range(i)]",
    "break": "break",
    "continue": "continue",
    "raise": "raise ValueError(f'{i} of {n}: {s:.2f}')",
    "assert": "assert i > n, (i, s)",
    "yield": "yield i",
}
SHAPES = {
    "loop": """
        def f(a, n):
            s = 0.0
            for i in range(n):
                x = a[i] + s
                s += x
                if x > 6.0:
                    EXIT
                a[i] = s
            a[-1] = 99.0
            return s
        """,
    "inner": """
        def f(a, n):
            s = 0.0
            for k in range(n):
                for i in range(n):
                    x = a[i] - s
                    if x > 3.0 and k > 1:
                        EXIT
                    s += 1.0
                else:
                    s += 10.0
                a[k] = s
            return s, k if n else None
        """,
    "while": """
        def f(a, n):
            s, k, x = 0.0, 0, 0.0
            while k < n:
                for i in range(k, n):
                    x = a[i] * 0.5
                    if x + k > 3.0:
                        EXIT
                    s = s + x
                k += 1
                a[k - 1] = s
            a[0] = -s
            return s
        """,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("leave", EXITS)
def test_each_exit_is_that_of_python(shape, leave):
    text = SHAPES[shape].replace("EXIT", EXITS[leave])
    decorated = check(text, compiled=leave in ("swapped", "break", "raise", "row"))
    if leave in ("swapped", "raise"):
        assert decorated.decisions()[0].execution == "serial"


@pytest.mark.parametrize(
    "text",
    [
        # names that the loop may leave unbound
        "for i in range(n):\n    if a[i] > 3: continue\n    x = a[i]\nreturn x",
        "for i in range(n):\n    a[i] += 1\nreturn i",
        "for i in range(n):\n    if a[i] > 2:\n        y = i\n    if a[i] > 3:\n        return y",
        # blocks around the loop
        "s = 0.0\nwith contextlib.suppress(ValueError):\n    for i in range(n):\n"
        "        s += a[i]\n        if s > 5: raise ValueError\nreturn s",
        "s = 0.0\ntry:\n    for i in range(n):\n        s += a[i]\n        "
        "if s > 5: raise KeyError\nexcept KeyError:\n    s = -s\nfinally:\n    a[1] = 7\nreturn s",
        "if n > 2:\n    for i in range(n):\n        if a[i] > 5: return 'early', i\n"
        "else:\n    a[0] = -1\nreturn n",
        "for i in range(n):\n    if a[i] > 5:\n        break\n"
        "else:\n    return 'no break'\nreturn i",
        "k = 0\nwhile k < n:\n    for i in range(k, n):\n        a[i] += k\n    k += 2\n"
        "else:\n    a[0] += 5\nreturn k",
        # frames, closures, generators
        "for i in range(n):\n    a[i] += 1\nreturn sorted(locals())",
        "for i in range(n):\n    g = lambda: i\n    if g() > 2: return g()\nreturn -1",
        "for i in range(n):\n    yield i\n    if a[i] > 3: return 5",
        "j = 3\nfor i in range(n):\n    y = len([j for j in range(i)])\n    a[i] += y\nreturn j, n",
        "t = 0\nfor i in range(n):\n    if (t := t + i) > 6: return t\nreturn t",
    ],
)
def test_what_surrounds_a_loop_or_hides_in_it_keeps_its_meaning(text):
    check("def f(a, n):\n" + textwrap.indent(text, "    "), compiled=False)


def indented(block):
    return textwrap.indent(block, "    ")


@st.composite
def blocks(draw, depth, in_loop):
    lines = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["set", "add", "store", "if", "leave", "for", "while"]))
        if kind == "set":
            lines.append(draw(st.sampled_from(["x = a[K] + s", "y = x - 1.0", "x = y * 0.5"])))
        elif kind == "add":
            lines.append(draw(st.sampled_from(["s += x", "c += 1", "s = s - y", "c = c + K"])))
        elif kind == "store":
            lines.append(draw(st.sampled_from(["a[K] = s", "a[K] += x", "a[c % 8] = y"])))
        elif kind == "leave" and in_loop:
            test = draw(st.sampled_from(["x > 4", "c > 3", "s < -2", "K == 3", "True"]))
            leave = draw(
                st.sampled_from(
                    ["break", "continue", "return", "return c", "return (s, x)", "return a[:c], y",
                     "raise IndexError(c)", "return [K, {'s': s}]"]
                )
            )  # fmt: skip
            lines.append(f"if {test}:\n    {leave}")
        elif kind == "if":
            body, other = draw(blocks(depth, in_loop)), draw(blocks(depth, in_loop))
            lines.append(f"if x > c:\n{indented(body)}\nelse:\n{indented(other)}")
        elif kind == "for" and depth:
            name = "ijk"[depth - 1]
            body = draw(blocks(depth - 1, True)).replace("K", name)
            tail = draw(st.sampled_from(["", f"\nelse:\n    s += {depth}.0"]))
            stop = draw(st.sampled_from(["n", "n - 1", "len(a)", "3"]))
            lines.append(f"for {name} in range({stop}):\n{indented(body)}{tail}")
        elif kind == "while" and depth:
            body = draw(blocks(depth - 1, True)).replace("K", f"w{depth}")
            # The counter comes first, so that continue cannot loop for ever.
            count = f"w{depth} = 0\nwhile w{depth} < n - 1:\n    w{depth} += 1\n"
            lines.append(count + indented(body))
    return "\n".join(lines) or "pass"


@given(blocks(3, False))
@settings(max_examples=30, deadline=None)
def test_generated_programs_leave_as_python_does(body):
    head = "def f(a, n):\n    s, c, x, y, K = 0.0, 0, 1.0, 2.0, 0\n"
    check(head + indented(body) + "\n    return s, c, x, y\n", compiled=False)
