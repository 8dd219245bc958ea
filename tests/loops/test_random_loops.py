"""Random loops against the oracle: whatever the analysis allows must be free of races, and keep the
loop's order where it says so."""

from __future__ import annotations

import linecache
import os

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from loops.harness import check_sound

SIZE = 30
NUM_EXAMPLES = int(os.environ.get("HOCKET_LOOP_EXAMPLES", "40"))
COUNTER = iter(range(10**9))


def function_of(text):
    """A function object whose source can be found."""
    name = f"<random loop {next(COUNTER)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space = {"np": np, "bump": _helper()}
    exec(compile(text, name, "exec"), space)
    return space["f"]


def _helper():
    text = "def bump(row, k, v):\n    row[k] = row[k] * 2 + v\n    return row[k] + 1\n"
    name = "<bump>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space = {}
    exec(compile(text, name, "exec"), space)
    return space["bump"]


@st.composite
def indices(draw, variables):
    """An index expression with values between 0 and SIZE - 1."""
    variable = draw(st.sampled_from(variables))
    forms = [
        variable, f"{variable} + 1", f"{variable} - 1", f"{variable} + 2", f"{variable} - 2",
        f"12 - {variable}", f"2 * {variable}", f"2 * {variable} + 1", "3", "c", f"{variable} + c",
        f"u[{variable}]", f"i[{variable}]", f"u[{variable}] + 1", f"u[{variable} + 1]",
        f"i[u[{variable}]]", f"({variable} * 7) % 5", f"u[{variable}] % 3", f"{variable} // 2",
    ]  # fmt: skip
    if len(variables) == 2:
        one, other = variables
        forms += [f"{one} + {other}", f"{one} - {other} + 12", f"u[{one}] + {other}"]
    return draw(st.sampled_from(forms))


@st.composite
def cells(draw, variables):
    array = draw(st.sampled_from(["x", "x", "y", "A", "B"]))
    first = draw(indices(variables))
    if array in ("x", "y"):
        return f"{array}[{first}]"
    return f"{array}[{first}, {draw(indices(variables))}]"


@st.composite
def statements(draw, variables, depth=0):
    """One or a few lines."""
    cell = draw(cells(variables))
    value = draw(
        st.sampled_from(["v[n]", "1", "s0", draw(cells(variables)), draw(cells(variables))])
    )
    kind = draw(st.integers(0, 19 if depth == 0 else 3))
    if kind <= 1:
        return [f"{cell} = ({value} + {draw(cells(variables))}) % 11"]
    if kind == 2:
        return [f"{cell} += {value}"]
    if kind == 3:
        return [f"{cell}, {draw(cells(variables))} = {value}, 7"]
    if kind == 4:
        inside = draw(statements(variables, depth=1))
        return [f"if {value} > 2:", *("    " + line for line in inside)]
    if kind == 5:
        row = draw(indices(variables))
        return [f"r = A[{row}]", f"r[{draw(indices(variables))}] = {value}"]
    if kind == 6:
        inside = draw(statements([*variables[:1], "k"], depth=1))
        return ["for k in range(2, 5):", *("    " + line for line in inside)]
    if kind == 7:
        return [f"total += {value}"]
    if kind == 8:
        array, row = draw(st.sampled_from("AB")), draw(indices(variables))
        return [f"t = bump({array}[{row}], {draw(indices(variables))}, {value})", f"{cell} = t"]
    if kind == 9:
        low = draw(indices(variables[:1]))
        return [f"x[{low}:{low} + 2] = {value}"]
    return draw(rarer_statements(variables, cell, value, kind))


@st.composite
def rarer_statements(draw, variables, cell, value, kind):
    """Scratch arrays, extremes, rows, inner `while`, swaps, views of views, names carried over."""
    one, other = draw(indices(variables)), draw(indices(variables))
    if kind == 10:
        return [f"if {value} > 4:", "    continue"]
    if kind == 11:
        first = draw(st.sampled_from(["0", "2", variables[0] + " // 3"]))
        return [
            f"for k in range({first}, 5):", f"    w[k] = {value}",
            "for k in range(2, 5):", f"    {cell} += w[k]",
        ]  # fmt: skip
    if kind == 12:
        return draw(st.sampled_from([
            [f"best = max(best, {value})"], [f"best = min({value}, best)"],
            [f"if {value} >= best:", f"    best = {value}"], [f"best |= {value}"],
        ]))  # fmt: skip
    if kind == 13:
        row = draw(st.sampled_from([f"A[{one}]", f"A[:, {one}]", f"B[{one}, 2:5]", f"B[{one}]"]))
        return [draw(st.sampled_from([f"{row} += {value}", f"{row} = A[{other}, 3]"]))]
    if kind == 14:
        inside = draw(statements([*variables[:1], "k"], depth=1))
        return ["k = 2", "while k < 5:", *("    " + line for line in inside), "    k += 1"]
    if kind == 15:
        return [f"x[{one}], x[{other}] = x[{other}], x[{one}]"]
    if kind == 16:
        view = draw(st.sampled_from(["A.T", "B[1:]", "A[:, 1:]", f"A[{one}:]"]))
        return [f"r = {view}", "q = r", f"q[3, {other} % 9] += {value}"]
    if kind == 17:
        return [f"{cell} = {value} if y[{one}] > 3 else x[{other}]"]
    if kind == 18:
        return [f"{cell} = carried", f"carried = {value}"]
    return ["r = x[2:]", f"r[{one}] = (r[{other}] + {value}) % 7"]


@st.composite
def programs(draw):
    """The text of a function with one loop or a nest of two."""
    first = draw(
        st.sampled_from([
            "n in range(3, 9)", "n in range(8, 2, -1)", "n in range(2, 11, 2)", "n in ns",
            "q, n in enumerate(ns)", "n, q in zip(ns, u)", "n in reversed(range(3, 8))",
            "n, q in np.ndindex(7, 2)",
        ])
    )  # fmt: skip
    nested = "ndindex" not in first and draw(
        st.booleans()
    )  # Python would enter the inner loop often
    variables = ["n", "m"] if nested else ["n"]
    body = []
    for _ in range(draw(st.integers(1, 3))):
        body += draw(statements(variables))
    names = "x, y, A, B, u, i, v, c, s0, ns, w"
    lines = [f"def f({names}):", "    total = carried = best = 0", f"    for {first}:"]
    if nested:
        second = draw(
            st.sampled_from(["range(3, 8)", "range(7, 2, -1)", "range(3, n + 1)", "range(2, 9, 3)"])
        )
        lines.append(f"        for m in {second}:")
    pad = "    " * (3 if nested else 2)
    lines += [pad + line for line in body]
    return "\n".join([*lines, "    return total + best + carried", ""])


def data(seed):
    rng = np.random.default_rng(seed)
    return (
        rng.integers(0, 9, SIZE), rng.integers(0, 9, SIZE), rng.integers(0, 9, (SIZE, SIZE)),
        rng.integers(0, 9, (SIZE, SIZE)), rng.integers(2, 12, SIZE), rng.integers(2, 12, SIZE),
        rng.integers(0, 9, SIZE), 4, 5, rng.integers(3, 9, 6), rng.integers(0, 9, SIZE),
    )  # fmt: skip


# Without shrinking: the programs are short, and shrinking one takes minutes.
@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(programs(), st.integers(0, 3), st.booleans(), st.booleans())
def test_what_is_allowed_never_races(text, seed, ordered, same_array):
    arguments = list(data(seed))
    if same_array:
        arguments[3] = arguments[2]  # two names of one array
    check_sound(function_of(text), tuple(arguments), workers=(3,), ordered=ordered)


@st.composite
def strided_sweeps(draw):
    """A stencil whose inner loop starts at a place that depends on the outer one."""
    step = draw(st.sampled_from([2, 3, 4, -2]))
    start = draw(st.sampled_from([
        "i % 2", "(i + c) % 2", "1 + (i & 1)", "2 - i % 2", "i % 4", "(c - i) % 4", "i",
        "2 * i % 3", "(i + i) % 2", "i % 3 + i % 2", "u[i] % 2", "c",
    ]))  # fmt: skip
    shifts = draw(
        st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2)), min_size=1, max_size=3)
    )
    reads = " + ".join(f"A[i + {one}, j + {other}]" for one, other in shifts)
    bounds = f"{start} + 2, 12, {step}" if step > 0 else f"12 + {start}, 2, {step}"
    return (
        "def f(A, u, c):\n    for i in range(2, 12):\n"
        f"        for j in range({bounds}):\n            A[i, j] = ({reads}) % 31 + 1\n"
    )


@settings(max_examples=NUM_EXAMPLES, deadline=None, phases=(Phase.generate, Phase.shrink))
@given(strided_sweeps(), st.integers(0, 3))
def test_strided_sweeps_are_free_of_races(text, c):
    rng = np.random.default_rng(0)
    check_sound(function_of(text), (rng.integers(0, 9, (30, 30)), rng.integers(0, 5, 30), c))
