"""Bösen's headline: time of managed communication to the loss that SSP ends with.

Run: sudo python benchmarks/systems/bosen.py [--repeats 2] [--json results.json]

Measured in five network namespaces with links of 1, 3, 10 and 100 Mbit on three data sets, one step
size each (benchmarks/tables/managed.py). Twenty minutes. `--json` reads results that are there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tables"))
from managed import DATA, compare, ratios

MBIT = (1.0, 3.0, 10.0, 100.0)


def ours(results: list[dict[str, Any]]) -> str:
    """The figures of the row in docs/systems.md."""
    found = ratios(results)
    cells = [f"{name} {', '.join(f'{found[name, mbit]:.2f}' for mbit in MBIT)}" for name in DATA]
    return f"time to the same loss relative to SSP at 1, 3, 10 and 100 Mbit: {'; '.join(cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.json is not None and options.json.is_file():
        results = json.loads(options.json.read_text())
    else:
        results = compare(list(DATA), list(MBIT), ["SSP", "managed"], options.repeats)
        if options.json is not None:
            options.json.write_text(json.dumps(results))
    print(ours(results))


if __name__ == "__main__":
    main()
