"""Small mistakes made on purpose, one at a time: which of them do the tests not notice?

    .venv/bin/python benchmarks/mutants.py src/hocket/plan/verify.py --tests tests/plan [--count 12]
    .venv/bin/python benchmarks/mutants.py                # four of each file of ROOMS, 100 in all

A mutant has one comparison turned, one whole number off by one, one sum turned into a difference,
one `and` turned into `or`, one condition always false or one statement left out. Each is tried in a
copy of the tree, never in the tree itself, and printed with its line; what lives is to be read:
some mutants change nothing that anybody could see.
"""

from __future__ import annotations

import argparse
import ast
import copy
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numba  # noqa: F401 - loaded once, here, for all mutants
import pytest
import scipy.optimize  # noqa: F401
import torch  # noqa: F401

TURNED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
DROPPED = (ast.Assign, ast.AugAssign, ast.Expr, ast.Continue, ast.Break)
NOT_LOADED = ("cacheprovider", "schemathesis", "xdist", "anyio", "faulthandler")
TOP = Path(__file__).resolve().parents[1]
ROOMS = {
    "simulate/verify": "plan/test_verify.py plan/test_limits.py",
    "simulate/analysis": "simulate/test_simulate_analysis.py",
    "simulate/timeline": "simulate/test_simulate_closed_forms.py simulate/test_pipeline.py",
    "simulate/gradients": "simulate/test_gradients.py",
    "simulate/path": "simulate/test_simulate_analysis.py",
    "plan/verify": "plan/test_verify.py plan/test_limits.py",
    "plan/files": "plan/test_plan_files.py",
    "plan/sections/schedule": "planners/test_schedules.py plan/test_parallel_files.py",
    "plan/sections/shares": "simulate/test_shares.py planners/parallel/test_whole.py",
    "plan/sections/memory": "plan/test_memory_section.py simulate/test_rewriting.py",
    "service/tokens": "service/test_tokens.py",
    "base/checkpoint_folder": "service/test_checkpoint.py",
    "service/store/store": "service/test_store_parts.py",
    "service/daemon/draft": "service/test_daemon_losses.py service/test_daemon_refusals.py",
    "planners/memory/refine": "planners/memory/test_budget.py",
    "planners/memory/rounding": "planners/memory/test_budget.py",
    "planners/parallel/groups": "planners/parallel",
    "planners/parallel/search": "planners/parallel",
    "runtime/batches": "runtime/test_train.py",
    "runtime/train/watch": "runtime/test_train_watch.py",
    "runtime/collectives/rank_tables": "runtime/collectives/test_tree_executor.py",
    "tables/budget": "tables/test_protocol.py",
    "loops/dependence": "loops/test_catalogue.py",
    "loops/tiles": "loops/test_catalogue.py",
}  # fmt: skip
"""The tests that are to notice a change in each file: the smallest selection that covers it."""


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
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--tests", nargs="+")
    parser.add_argument("--room", default="", help="only files of ROOMS that begin so")
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS")
    options = parser.parse_args()
    if (options.file is None) != (options.tests is None):
        parser.error("a file and its --tests go together")
    rooms = {
        f"src/hocket/{file}.py": [f"tests/{test}" for test in tests.split()]
        for file, tests in ROOMS.items()
        if file.startswith(options.room)
    }
    if options.file is not None:
        rooms = {str(options.file.resolve().relative_to(TOP)): options.tests}
    lives = tried = 0
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        for name in ("src", "tests", "pyproject.toml"):
            source = TOP / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, there / name)
        for path, tests in rooms.items():
            if not _passes(there, tests, options.timeout):
                print(f"{path}: its tests fail as it is", flush=True)
                continue
            living, all_ = _try(there, path, tests, options)
            lives, tried = lives + living, tried + all_
    print(f"{lives} of {tried} live")
    return 0


def _try(there: Path, path: str, tests: list[str], options: argparse.Namespace) -> tuple[int, int]:
    """How many mutants of a file live, and how many were tried; each is printed."""
    original = (TOP / path).read_text()
    tree = ast.parse(original)
    inside = [place for place in places(tree) if _line(tree, place) >= _first_line(tree)]
    chosen = random.Random(options.seed).sample(inside, min(options.count, len(inside)))
    lives = 0
    for change, number in sorted(chosen, key=lambda place: place[1]):
        made, line = mutant(tree, change, number)
        (there / path).write_text(ast.unparse(made))
        is_alive = _passes(there, tests, options.timeout)
        lives += is_alive
        text = original.splitlines()[line - 1].strip()
        print(f"{path}:{line} {change}{' LIVES' * is_alive}: {text}", flush=True)
    (there / path).write_text(original)
    print(f"{path}: {lives} of {len(chosen)} live", flush=True)
    return lives, len(chosen)


def _first_line(tree: ast.Module) -> int:
    """Where functions and classes begin: what stands above are imports and settings."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return min((node.lineno for node in tree.body if isinstance(node, kinds)), default=1)


def _line(tree: ast.Module, place: tuple[str, int]) -> int:
    line: int = list(ast.walk(tree))[place[1]].lineno  # type: ignore[attr-defined]
    return line


def _passes(there: Path, tests: list[str], timeout_s: float) -> bool:
    """Whether tests pass in the copy, in a fork of this process: what is slow to load is loaded."""
    child = multiprocessing.get_context("fork").Process(target=_test, args=(there, tests))
    child.start()
    child.join(timeout_s)
    if child.is_alive():
        child.kill()
        child.join()
        print("what follows ran out of time, which counts as noticed", flush=True)
    return child.exitcode == 0


def _test(there: Path, tests: list[str]) -> NoReturn:
    os.setsid()
    os.chdir(there)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    sys.path[:0] = [str(there / "src"), str(there / "tests"), str(there)]
    os.environ["PYTHONPATH"] = f"{there / 'src'}:{there / 'tests'}"
    plugins = [word for name in NOT_LOADED for word in ("-p", f"no:{name}")]
    code = pytest.main(["-q", "-x", "-o", "timeout=0", *plugins, *tests])
    os._exit(int(code))


if __name__ == "__main__":
    sys.exit(main())
