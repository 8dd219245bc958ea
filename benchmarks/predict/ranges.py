"""The 80 % ranges of `hocket.cost.ranges`, from the tables of measured and predicted steps.

    python benchmarks/predict/ranges.py

Prints the 10 % and 90 % quantiles of measured over predicted step times for each source of costs.
No row is left out. Constants behind the datasheet rows were chosen with the ``chosen`` ones, so the
``held-out`` rows alone are shown beside all of them.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parents[1] / "results"
THIRD_PARTY = RESULTS / "2026-11-18-thirdparty-h200.md"
CONFIGS = RESULTS / "2026-11-16-predict-configs-h200.md"
CALIBRATED = RESULTS / "2026-11-16-predict-configs-calibrated-h200.md"


def rows(path: Path) -> list[list[str]]:
    """Cells of all lines of tables in a file."""
    lines = path.read_text().splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]


def third_party(section: str) -> list[float]:
    """Measured over predicted steps of one section of the third-party table."""
    text = THIRD_PARTY.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| [^|]+ \| ([\d.]+) ms \| ([\d.]+) \|", text, re.MULTILINE)
    return [float(measured) / float(predicted) for measured, predicted in found]


def configurations(path: Path, column: int, *, only_held_out: bool) -> list[float]:
    """The same of a column that holds an error such as ``(-9.1%)``."""
    ratios = []
    for cells in rows(path):
        error = re.search(r"\(([-+][\d.]+)%\)", cells[column]) if len(cells) > column else None
        if error is not None and (not only_held_out or cells[2] == "held out"):
            ratios.append(1 / (1 + float(error[1]) / 100))
    return ratios


def main() -> None:
    chosen, held_out = third_party("chosen"), third_party("held-out")
    profiled = [
        ratio for path in (CONFIGS, CALIBRATED)
        for ratio in configurations(path, 4, only_held_out=False)
    ]  # fmt: skip
    found = {
        "datasheet": chosen + held_out,
        "datasheet, held-out rows alone": held_out,
        "calibrated": configurations(CALIBRATED, 5, only_held_out=True),
        "profiled": profiled,
    }
    for source, ratios in found.items():
        low, high = np.quantile(ratios, (0.1, 0.9))
        print(f"{source}: {low:.2f} to {high:.2f}, {len(ratios)} rows")
    low, high = np.quantile(chosen, (0.1, 0.9))
    covered = np.mean([(low <= ratio <= high) for ratio in held_out])
    print(f"range of the chosen rows covers {100 * covered:.0f} % of the held-out rows")


if __name__ == "__main__":
    main()
