"""Small mistakes made on purpose, one at a time: which of them do the tests not notice?

    .venv/bin/python benchmarks/mutants.py src/hocket/plan/verify.py --tests tests/plan [--count 12]

A mutant has one comparison turned, one whole number off by one, one sum turned into a difference,
one `and` turned into `or`, one condition always false or one statement left out. Each is tried in a
copy of the tree, never in the tree itself; what lives is printed with its line, to be read: some
mutants change nothing that anybody could see.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

TURNED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
DROPPED = (ast.Assign, ast.AugAssign, ast.Expr, ast.Continue, ast.Break)
TOP = Path(__file__).resolve().parents[1]


def places(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What can be changed, as the sort of change and the number of the node in `ast.walk`."""
    for number, node in enumerate(ast.walk(tree)):
        if isinstance(node, ast.Compare | ast.BinOp | ast.BoolOp) and type(_sign(node)) in TURNED:
            yield "turn", number
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield "off by one", number
        elif isinstance(node, ast.If):
            yield "never", number
        elif isinstance(node, DROPPED) and not _is_text(node):
            yield "leave out", number


def mutant(tree: ast.Module, change: str, number: int) -> tuple[ast.Module, int]:
    """The tree with one change, and its line."""
    made = copy.deepcopy(tree)
    node = list(ast.walk(made))[number]
    if change == "turn":
        turned = TURNED[type(_sign(node))]()
        if isinstance(node, ast.Compare):
            node.ops[0] = turned
        else:
            node.op = turned  # type: ignore[attr-defined]
    elif change == "off by one":
        node.value += 1  # type: ignore[attr-defined]
    elif change == "never":
        node.test = ast.Constant(value=False)  # type: ignore[attr-defined]
    else:
        _replace(made, node)
    return ast.fix_missing_locations(made), node.lineno  # type: ignore[attr-defined]


def _sign(node: ast.AST) -> ast.AST:
    return node.ops[0] if isinstance(node, ast.Compare) else node.op  # type: ignore[attr-defined]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _replace(tree: ast.Module, gone: ast.AST) -> None:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list) and gone in body:
                body[body.index(gone)] = ast.Pass()  # type: ignore[arg-type]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tests", nargs="+", required=True)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS")
    options = parser.parse_args()
    path = options.file.resolve().relative_to(TOP)
    tree = ast.parse((TOP / path).read_text())
    inside = [place for place in places(tree) if _line(tree, place) >= _first_line(tree)]
    chosen = random.Random(options.seed).sample(inside, min(options.count, len(inside)))
    lives = 0
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        for name in ("src", "tests", "pyproject.toml"):
            source = TOP / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, there / name)
        for change, number in sorted(chosen, key=lambda place: place[1]):
            made, line = mutant(tree, change, number)
            (there / path).write_text(ast.unparse(made))
            if _passes(there, options.tests, options.timeout):
                lives += 1
                text = (TOP / path).read_text().splitlines()[line - 1].strip()
                print(f"{path}:{line} {change} lives: {text}", flush=True)
    print(f"{path}: {lives} of {len(chosen)} live")
    return 0


def _first_line(tree: ast.Module) -> int:
    """Where functions and classes begin: what stands above are imports and settings."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return min((node.lineno for node in tree.body if isinstance(node, kinds)), default=1)


def _line(tree: ast.Module, place: tuple[str, int]) -> int:
    line: int = list(ast.walk(tree))[place[1]].lineno  # type: ignore[attr-defined]
    return line


def _passes(there: Path, tests: list[str], timeout_s: float) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": f"{there / 'src'}:{there / 'tests'}"}
    try:
        done = subprocess.run(
            command, cwd=there, env=environment, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
