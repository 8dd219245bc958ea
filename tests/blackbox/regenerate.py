# ruff: noqa: T201
"""Write `golden/` anew and list what changed: ``python tests/blackbox/regenerate.py [AREA…]``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from blackbox.cases import AREAS, changes, golden, write_golden, write_inputs


def main(areas: list[str]) -> None:
    """Regenerate these areas, or all."""
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        for area in areas or AREAS:
            old, new = golden(area), {}
            for name, case in AREAS[area].items():
                if case.needs is not None and not case.needs.exists():
                    new[name] = old.get(name)
                    print(f"{area}: {name}: kept, {case.needs.name} is not here")
                    continue
                new[name] = case.answer(Path(folder))
                for line in changes(old.get(name, {}), new[name]):
                    print(f"{area}: {name}: {line}", flush=True)
            write_golden(area, new)


if __name__ == "__main__":
    main(sys.argv[1:])
