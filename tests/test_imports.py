"""Start-up is a feature: heavy packages are imported by what needs them, and only then."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import hocket

HEAVY = ("torch", "ray", "transformers", "numba", "scipy", "fastapi", "networkx", "pydantic")


def _modules_after(code: str) -> set[str]:
    script = f"{code}\nimport json, sys\nprint('\\n' + json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def _run(*arguments: str) -> str:
    return (
        "import hocket.cli, contextlib\n"
        "with contextlib.suppress(SystemExit):\n"
        f"    hocket.cli.main({list(arguments)!r})"
    )


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["completion", "bash"]])
def test_help_imports_nothing_heavy(arguments):
    assert not _modules_after(_run(*arguments)) & set(HEAVY)


def test_nothing_that_plans_or_trains_imports_a_solver_before_it_solves():
    imported = "import hocket.api.planners, hocket.api.memory, hocket.api.planned, hocket.view.text"
    assert not _modules_after(imported) & set(HEAVY)


def test_the_daemon_of_a_fleet_imports_no_planner_and_no_simulator():
    imported = "import hocket.cli.fleet.serve, hocket.fleet.simulator, hocket.service.serve"
    assert not _modules_after(imported) & {"hocket.planners", "hocket.simulate", "hocket.cost"}


def test_commands_that_work_from_files_never_import_torch_or_ray(tmp_path):
    graph, plan = str(tmp_path / "g.json.gz"), str(tmp_path / "plan.json")
    generate = _modules_after(_run("generate", "transformer", "--ops", "200", "-o", graph))
    assert not generate & {"torch", "ray", "transformers", "numba", "scipy"}
    commands = (
        ("plan", graph, "--on", "2xv100-16g", "-o", plan), ("show", plan), ("simulate", plan)
    )  # fmt: skip
    # In one process: what none of them imports, all of them together do not.
    modules = _modules_after("\n".join(_run(*command) for command in commands))
    assert not modules & {"torch", "ray", "transformers", "fastapi", "networkx"}
    assert "numba" in modules
    assert Path(plan).is_file()


def test_public_names_are_exactly_the_listed_ones():
    assert dir(hocket) == hocket.__all__
    for name in hocket.__all__:
        assert getattr(hocket, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = hocket.nonsense


def test_names_that_scripts_take_from_hocket_are_there():
    root = Path(__file__).parents[1]
    scripts = [root / "scripts" / "compile", *root.glob("benchmarks/**/*.py")]
    missing = []
    for script in [*scripts, *root.glob("examples/*.py")]:
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hocket":
                missing += [f"{script.name}: {name}" for name in _absent(node)]
    assert missing == []


def _absent(node: ast.ImportFrom) -> list[str]:
    """Names that an import asks for and that are neither in the module nor modules themselves."""
    assert node.module is not None
    absent = []
    for alias in node.names:
        try:
            found = hasattr(importlib.import_module(node.module), alias.name)
            found = found or bool(importlib.import_module(f"{node.module}.{alias.name}"))
        except ModuleNotFoundError:
            found = False
        if not found:
            absent.append(f"{node.module}.{alias.name}")
    return absent
