"""Mutation tests: change one small thing in the source at a time, and list the changes that no test
notices.

    .venv/bin/python benchmarks/mutants.py --under fleet --under service --count 30 --seed 41
    .venv/bin/python benchmarks/mutants.py src/hocket/plan/verify.py --tests tests/plan --count 12

A mutant has one comparison changed, one integer increased by one, one sum turned into a difference,
one `and` turned into `or`, one condition that is always false, or one statement left out. Mutants
are drawn evenly from all places where a change is possible, and each is tested in a copy of the
tree. The tests of `TESTS` run first, then those of `ALL_TESTS` where the first noticed nothing.
A failing test is also run without the change, so that a flaky one counts for nothing. Read each
survivor: some changes have no effect that a user could see.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, NoReturn

import numba  # noqa: F401 - loaded once, here, for all mutants
import pytest
import scipy.optimize  # noqa: F401
import torch  # noqa: F401

CHANGED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
OMITTED = (ast.Assign, ast.AugAssign, ast.Expr, ast.Continue, ast.Break)
NOT_LOADED = ("cacheprovider", "schemathesis", "xdist", "anyio", "faulthandler")
TOP = Path(__file__).resolve().parents[1]
POLICIES = (
    "fleet/test_policy_promises.py fleet/test_policies_public.py fleet/test_ties_and_bounds.py "
    "fleet/test_claims.py fleet/test_policies_properties.py fleet/test_policies_against_programs.py"
)
ROUNDS = (
    "fleet/test_rounds_rules.py fleet/test_rounds_step.py fleet/test_reservations.py "
    "fleet/test_rounds_stops.py fleet/test_rounds_shares.py fleet/test_rounds_gangs.py "
    "fleet/test_rounds_pairs.py fleet/test_fairness.py fleet/test_dependencies.py "
    "fleet/test_rounds_refusals.py fleet/test_rounds_machine.py"
)
DAEMON = (
    "service/test_daemon.py service/test_daemon_refusals.py service/test_daemon_losses.py "
    "service/test_daemon_features.py service/test_daemon_elastic.py service/test_daemon_untried.py "
    "service/test_space_sharing.py service/test_daemon_instants.py service/test_daemon_threads.py"
)
LOCAL = (
    "service/test_local.py service/test_limits.py service/test_attempts.py "
    "service/test_hostile_jobs.py service/test_local_devices.py service/test_local_log.py "
    "service/test_local_names.py service/test_local_daemon.py service/test_attempt_log.py"
)
REST = (
    "service/test_rest.py service/test_rest_fleet.py service/test_rest_security.py "
    "service/test_rest_limits.py service/test_rest_logs.py service/test_rest_stream.py "
    "service/test_roles.py service/test_everyday.py service/test_tokens.py"
)
STORE = (
    "service/test_store.py service/test_store_parts.py service/test_snapshot.py "
    "service/test_store_damage.py"
)
TESTS = {
    "fleet/policies": POLICIES,
    "fleet/solve": f"fleet/test_solve.py fleet/test_solve_bound.py {POLICIES}",
    "fleet/rounds": ROUNDS,
    "fleet/simulator": "fleet/test_simulator.py fleet/test_published.py fleet/test_elastic.py "
    "fleet/test_simulate_command.py",
    "fleet/throughputs": "fleet/test_throughputs.py fleet/test_throughputs_predict.py "
    "fleet/test_planned_throughputs.py fleet/test_unseen.py fleet/test_unseen_belief.py",
    "fleet/traces": "fleet/test_traces.py fleet/test_small_files.py",
    "fleet/problem_file": "fleet/test_allocate.py fleet/test_small_files.py",
    "fleet/gangs": "fleet/test_elastic.py service/test_daemon_elastic.py",
    "fleet/": f"fleet/test_forecast.py fleet/test_boundaries.py {POLICIES}",
    "service/daemon": DAEMON,
    "service/executors/slurm": "service/test_slurm_nodes.py service/test_slurm.py",
    "service/executors/agent": "service/test_agents.py service/test_agent_client.py",
    "service/executors": LOCAL,
    "service/agent": "service/test_agents.py service/test_agent_client.py",
    "service/ray": "service/test_ray.py",
    "service/rest": REST,
    "service/server_config": "service/test_daemon_features.py service/test_roles.py",
    "service/tokens": "service/test_tokens.py service/test_roles.py service/test_rest_security.py",
    "service/credentials": "service/test_roles.py service/test_rest_security.py",
    "service/page": "service/test_page.py service/test_page_recent.py service/test_page_buttons.py "
    "service/test_page_hostile.py service/test_page_picture.py service/test_forecasts.py",
    "service/forecasts": "service/test_forecasts.py",
    "service/store": STORE,
    "service/lease": "service/test_lease.py service/test_lease_away.py "
    "service/test_lease_revived.py",
    "service/client": "service/test_fleet_client.py service/test_fleet_commands.py",
    "service/": f"service/test_fleet_refusals.py service/test_endpoint.py {REST}",
    "simulate/": "simulate plan/test_verify.py plan/test_limits.py",
    "plan/": "plan",
    "base/": "base",
    "planners/memory": "planners/memory",
    "planners/parallel": "planners/parallel",
    "planners/placement": "planners/placement",
    "runtime/collectives": "runtime/collectives",
    "tables/": "tables",
    "loops/": "loops",
}
"""Tests that cover the files whose paths begin so, quick ones first; the first entry counts."""
ALL_TESTS = {"fleet/": "fleet", "service/": "service"}
"""Tests that a survivor of the tests above has to pass as well."""


TIMEOUT = "the time limit"


class Place(NamedTuple):
    """A place where a file can be changed: the sort of change, and the index in `ast.walk`."""

    path: str
    change: str
    index: int


def places(path: str) -> Iterator[Place]:
    """All places where a file below ``src/hocket`` can be changed; imports and settings cannot."""
    tree = _parsed(path)
    kinds = (ast.FunctionDef, ast.ClassDef)
    first = min((node.lineno for node in tree.body if isinstance(node, kinds)), default=1)
    for index, node in enumerate(ast.walk(tree)):
        if getattr(node, "lineno", 0) < first:
            continue
        if isinstance(node, ast.Compare | ast.BinOp | ast.BoolOp) and type(_sign(node)) in CHANGED:
            yield Place(path, "operator", index)
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield Place(path, "off by one", index)
        elif isinstance(node, ast.If):
            yield Place(path, "never", index)
        elif isinstance(node, OMITTED) and not _is_text(node):
            yield Place(path, "left out", index)


def mutant(place: Place) -> tuple[ast.Module, int]:
    """The changed file, and the line of the change."""
    tree = _parsed(place.path)
    node = list(ast.walk(tree))[place.index]
    line: int = node.lineno  # type: ignore[attr-defined]
    if place.change == "operator":
        changed = CHANGED[type(_sign(node))]()
        if isinstance(node, ast.Compare):
            node.ops[0] = changed
        else:
            node.op = changed  # type: ignore[attr-defined]
    elif place.change == "off by one":
        node.value += 1  # type: ignore[attr-defined]
    elif place.change == "never":
        node.test = ast.Constant(value=False)  # type: ignore[attr-defined]
    else:
        _omit(tree, node)
    return ast.fix_missing_locations(tree), line


def _parsed(path: str) -> ast.Module:
    return ast.parse((TOP / path).read_text())


def _sign(node: ast.AST) -> ast.AST:
    return node.ops[0] if isinstance(node, ast.Compare) else node.op  # type: ignore[attr-defined]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _omit(tree: ast.Module, gone: ast.AST) -> None:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list) and gone in body:
                body[body.index(gone)] = ast.Pass()  # type: ignore[arg-type]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--tests", nargs="+", help="tests of the file")
    parser.add_argument("--under", action="append", default=[], help="folder below src/hocket")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS")
    options = parser.parse_args()
    if (options.file is None) != (options.tests is None):
        parser.error("a file and its --tests go together")
    if options.file is not None:
        files = [options.file.resolve()]
    else:
        roots = [TOP / "src" / "hocket" / name for name in options.under or ["."]]
        files = sorted(path for root in roots for path in root.rglob("*.py"))
    found = [place for path in files for place in places(str(path.relative_to(TOP)))]
    drawn = random.Random(options.seed).sample(found, min(options.count, len(found)))
    num_living = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in (
            "src",
            "tests",
            "benchmarks",
            "examples",
            "docs",
            "README.md",
            "pyproject.toml",
        ):
            copy_of = shutil.copytree if (TOP / name).is_dir() else shutil.copy
            copy_of(TOP / name, Path(folder) / name)
        for place in sorted(drawn):
            num_living += _lives(Path(folder), place, options.tests, options.timeout)
    print(f"{num_living} of {len(drawn)} live (seed {options.seed}, {len(found)} places)")
    return 0


def _lives(folder: Path, place: Place, named: list[str] | None, timeout_s: float) -> bool:
    """Test a mutant and print the result; True if no test notices the change."""
    changed, line = mutant(place)
    original = (TOP / place.path).read_text()
    stages = [named] if named else [_tests_of(table, place.path) for table in (TESTS, ALL_TESTS)]
    verdict = "LIVES"
    for tests in stages:
        (folder / place.path).write_text(ast.unparse(changed))
        failed = _first_failure(folder, tests, timeout_s)
        (folder / place.path).write_text(original)
        if "::" in failed and _first_failure(folder, [failed], timeout_s):
            verdict = f"LIVES (or {failed} is flaky)"
        elif failed:
            verdict = f"noticed by {failed}"
            break
    print(f"{place.path}:{line} {place.change}: {original.splitlines()[line - 1].strip()}")
    print(f"    {verdict}", flush=True)
    return verdict.startswith("LIVES")


def _tests_of(table: dict[str, str], path: str) -> list[str]:
    own = path.removeprefix("src/hocket/")
    tests = next((text for name, text in table.items() if own.startswith(name)), "")
    return [f"tests/{test}" for test in tests.split()]


def _first_failure(folder: Path, tests: list[str], timeout_s: float) -> str:
    """The first test that fails in the copy, or `TIMEOUT`; empty if all pass.

    Tests run in a fork of this process, in which all that is slow to import is loaded.
    """
    if not tests:
        return ""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_test, args=(folder, tests, sender))
    child.start()
    sender.close()
    failed = TIMEOUT
    if receiver.poll(timeout_s):
        try:
            failed = receiver.recv()
        except EOFError:
            failed = "a crash of the tests"
    else:
        child.kill()
    child.join()
    return failed


class _Failures:
    """A plugin of pytest that keeps the name of the first test that fails."""

    def __init__(self) -> None:
        self.first = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.first = self.first or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.first = self.first or report.nodeid


def _test(folder: Path, tests: list[str], sender: Connection) -> NoReturn:
    os.setsid()
    os.chdir(folder)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    sys.path[:0] = [str(folder / "src"), str(folder / "tests"), str(folder)]
    os.environ["PYTHONPATH"] = f"{folder / 'src'}:{folder / 'tests'}"
    plugins = [word for name in NOT_LOADED for word in ("-p", f"no:{name}")]
    failures = _Failures()
    code = pytest.main(["-q", "-x", "-o", "timeout=0", *plugins, *tests], plugins=[failures])
    sender.send(failures.first or ("" if code == 0 else f"exit code {int(code)}"))
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
