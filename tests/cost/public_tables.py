"""Tables of the public files in ``../shared/data``, converted once per test run."""

import importlib.util
import tempfile
from functools import cache
from pathlib import Path

from hocket.cost.parallel.measured_runs import MeasuredRun
from hocket.cost.validation import load_tables

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data" / "parallelism"


def converter():
    """The script that makes tables of public files."""
    path = ROOT / "benchmarks" / "published" / "convert.py"
    spec = importlib.util.spec_from_file_location("convert_published", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def public_tables() -> dict[str, list[MeasuredRun]]:
    """All tables by name; empty without the public files."""
    if not DATA.is_dir():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        converter().convert(DATA, Path(folder))
        return load_tables(folder)
