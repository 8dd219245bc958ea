"""``hocket doctor``: versions of packages, extras, and self-tests, for a bug report.

The self-tests plan a small problem, detect the devices and check the limits of job processes.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

import click

from hocket.cli.declare import declare
from hocket.cli.output import emit, fail
from hocket.cli.sources import announce_compilation

FAILED = "failed:"
_CORE = ("numpy", "scipy", "numba", "click", "rich", "pydantic")
# pip records which extras exist but not their purpose, so the table is written here by hand.
_EXTRAS = {
    "torch": (
        "capture and train PyTorch models: hocket plan MODEL, hocket.prepare, run, launch",
        ("torch", "transformers"),
    ),
    "serve": (
        "the cluster scheduler's daemon and page: hocket fleet serve",
        ("fastapi", "jinja2", "uvicorn", "prometheus-client", "cryptography"),
    ),
    "ray": ("fleet jobs on a Ray cluster", ("ray",)),
    "tables": (
        "parameter tables with bounded staleness: hocket tables, hocket.tables", ("pyzmq",),
    ),
    "classes": (
        "classifiers split by class: hocket split, serve-classes",
        ("onnx", "onnxruntime", "safetensors", "torch-pruning"),
    ),
    "docs": ("the docs site: make docs", ("mkdocs-material", "mkdocstrings")),
}  # fmt: skip
"""Purpose and packages of each extra of the distribution."""


@declare("doctor")
def command(
    *,
    as_json: bool,
) -> None:
    """Report versions, devices and whether the parts of hocket work here. Exit 6 if not."""
    from hocket import __version__
    from hocket.base.errors import CheckError

    announce_compilation()
    result: dict[str, Any] = {
        "hocket": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _CORE},
        "extras": {extra: _extra(extra) for extra in _EXTRAS},
        "checks": {name: check() for name, check in _CHECKS.items()},
    }
    failed = [name for name, outcome in result["checks"].items() if outcome.startswith(FAILED)]
    if failed:
        error = CheckError(f"not working here: {', '.join(failed)}", hint="see the checks")
        if not as_json:
            _show(result)
        raise SystemExit(fail(error, as_json=as_json, extra=result))
    if as_json:
        emit(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    click.echo(f"hocket {result['hocket']}, Python {result['python']}, {result['platform']}")
    for name, version in result["packages"].items():
        click.echo(f"  {name:<13}{version or '–'}")
    for name, outcome in result["checks"].items():
        click.echo(f"  {name:<13}{outcome}")
    click.echo("extras")
    for name, extra in result["extras"].items():
        state = "installed" if extra["installed"] else f"pip install 'hocket[{name}]' adds"
        click.echo(f"  {name:<13}{state}: {extra['adds']}")
        found = [f"{each} {version}" for each, version in extra["packages"].items() if version]
        if found:
            click.echo(f"  {'':<13}{', '.join(found)}")


def _extra(name: str) -> dict[str, Any]:
    """Versions of an extra's packages, its purpose, and whether it is complete."""
    adds, names = _EXTRAS[name]
    packages = {package: _version(package) for package in names}
    installed = all(version is not None for version in packages.values())
    return {"installed": installed, "adds": adds, "packages": packages}


def _version(package: str) -> str | None:
    # importlib.metadata is imported here, because its import takes a quarter of the time of hocket
    # --help and no other command needs it.
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _simulator() -> str:
    from hocket.graph.generators import generate
    from hocket.plan.make import make_problem
    from hocket.planners.compare import compare

    comparison = compare(make_problem(generate("transformer", 200, 0), "2xv100-16g"))
    return "ok" if comparison.winner is not None else "no plan for the test problem"


def _devices() -> str:
    from hocket.api.clusters import detect

    return repr(detect())


def _job_limits() -> str:
    from hocket.service.executors.cgroups import describe_limits, find_cgroups

    return describe_limits(find_cgroups()) if sys.platform == "linux" else "jobs need Linux"


def _attempt(check: Any) -> Any:
    def attempted() -> str:
        try:
            return str(check())
        # Any exception of a self-test is a finding to report, not an error of the doctor.
        except Exception as error:
            return f"{FAILED} {type(error).__name__}: {error}"

    return attempted


_CHECKS = {
    "simulator": _attempt(_simulator),
    "devices": _attempt(_devices),
    "job limits": _attempt(_job_limits),
}
