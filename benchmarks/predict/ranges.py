"""The 80 % ranges of `hocket.cost.ranges`, from the tables of measured and predicted steps.

    python benchmarks/predict/ranges.py [--data FOLDER]

Prints the 10 % and 90 % quantiles of measured over predicted step times for each source of costs.
No row is left out. Constants behind the datasheet rows were chosen with the ``chosen`` ones.

Last, the 80 % range of the *ratio* of two steps: of all pairs of published runs of one model with
one program, on as many devices of one site, with one global batch, the quantile of
abs(log(measured ratio / predicted ratio)). Tables count alike, however many pairs they have.
Mixtures of experts are left out: their releases differ by up to 1.8 times.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.measured_runs import MeasuredRun
from hocket.cost.validation import calibrated_site, load_tables, predict_steps

RESULTS = Path(__file__).parents[1] / "results"
THIRD_PARTY = (
    RESULTS / "2026-11-18-thirdparty-h200.md", RESULTS / "2026-11-18-thirdparty-drawn-h200.md"
)  # fmt: skip
CONFIGS = RESULTS / "2026-11-16-predict-configs-h200.md"
CALIBRATED = RESULTS / "2026-11-16-predict-configs-calibrated-h200.md"


def rows(path: Path) -> list[list[str]]:
    """Cells of all lines of tables in a file."""
    lines = path.read_text().splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]


def third_party() -> list[tuple[str, float, bool]]:
    """Session, measured over predicted step, and True if the host limits it, of every row."""
    found = []
    for path in THIRD_PARTY:
        section = ""
        for line in path.read_text().splitlines():
            section = line if line.startswith("## ") else section
            cells = [cell.strip() for cell in line.split("|")[1:-1]]
            if len(cells) != 10 or not cells[1].endswith(" ms"):
                continue
            measured_ms, predicted_ms = float(cells[1].removesuffix(" ms")), float(cells[2])
            # One table has no host times: where the step is longer than the device's, the host is.
            has_host = not cells[5].endswith("%")
            device_ms, host_ms = (float(cells[i]) for i in ((5, 7) if has_host else (7, 2)))
            is_host_bound = host_ms > device_ms * (1.0 if has_host else 1.02)
            found.append((f"{path.stem}{section}", measured_ms / predicted_ms, is_host_bound))
    return found


def print_third_party() -> None:
    """Quantiles of the rows that the host limits and of the others; sessions count alike."""
    for title, is_host in (("device-bound", False), ("host-bound", True)):
        rows = [(session, ratio) for session, ratio, waits in third_party() if waits == is_host]
        per_session = Counter(session for session, _ in rows)
        # Steps that the device limits do not depend on the host of the session.
        weights = [1 / per_session[session] if is_host else 1.0 for session, _ in rows]
        low, high = weighted_quantiles([ratio for _, ratio in rows], weights, (0.1, 0.9))
        print(f"datasheet, {title}: {low:.2f} to {high:.2f}, {len(rows)} rows")


def weighted_quantiles(
    values: Sequence[float], weights: Sequence[float], parts: tuple[float, ...]
) -> list[float]:
    """Values below which these parts of the weight lie."""
    order = np.argsort(values)
    reached = np.cumsum(np.array(weights)[order]) / sum(weights)
    return [float(np.array(values)[order][np.searchsorted(reached, part)]) for part in parts]


def configurations(path: Path, column: int, *, only_held_out: bool) -> list[float]:
    """The same of a column that holds an error such as ``(-9.1%)``."""
    ratios = []
    for cells in rows(path):
        error = re.search(r"\(([-+][\d.]+)%\)", cells[column]) if len(cells) > column else None
        if error is not None and (not only_held_out or cells[2] == "held out"):
            ratios.append(1 / (1 + float(error[1]) / 100))
    return ratios


def ratio_errors(
    rows: Sequence[MeasuredRun], coefficients: Mapping[str, Coefficients]
) -> list[float]:
    """Absolute log errors of the predicted ratio of all pairs of comparable runs of a table."""
    measured_s = np.array([row.step_s for row in rows], dtype=np.float64)
    errors = np.log(predict_steps(rows, coefficients) / measured_s)
    groups: dict[object, list[float]] = defaultdict(list)
    for row, error in zip(rows, errors, strict=True):
        shared = (row.model, row.software.name, row.config.num_devices)
        groups[(*shared, row.config.global_batch)].append(error)
    return [abs(a - b) for group in groups.values() for a, b in combinations(group, 2)]


def print_ratios(data: Path | None) -> None:
    """The range of ratios with nothing measured, and calibrated with at most ten runs per site."""
    tables = {name: rows for name, rows in load_tables(data).items() if "experts" not in name}
    for title, is_calibrated in (("datasheet", False), ("calibrated", True)):
        errors, weights = list[float](), list[float]()
        for rows in tables.values():
            ran = [row for row in rows if row.step_s is not None]
            sites = {row.cluster: calibrated_site(row.cluster, tables) for row in ran}
            fitted = dict.fromkeys(sites, Coefficients())
            if is_calibrated:
                ran = [r for r in ran if (r.table, r.row) not in sites[r.cluster].timed]
                fitted = {name: site.coefficients for name, site in sites.items()}
            found = ratio_errors(ran, fitted) if ran else []
            errors += found
            weights += [1 / max(len(found), 1)] * len(found)
        order = np.argsort(errors)
        reached = np.cumsum(np.array(weights)[order]) / sum(weights)
        width = np.expm1(np.array(errors)[order][np.searchsorted(reached, 0.8)])
        print(f"ratio, {title}: within {width:.3f}, {len(errors)} pairs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of tables that benchmarks/published/convert.py wrote",
    )
    options = parser.parse_args()
    print_third_party()
    profiled = [
        ratio for path in (CONFIGS, CALIBRATED)
        for ratio in configurations(path, 4, only_held_out=False)
    ]  # fmt: skip
    found = {
        "calibrated": configurations(CALIBRATED, 5, only_held_out=True),
        "profiled": profiled,
    }
    for source, ratios in found.items():
        low, high = np.quantile(ratios, (0.1, 0.9))
        print(f"{source}: {low:.2f} to {high:.2f}, {len(ratios)} rows")
    print_ratios(options.data)


if __name__ == "__main__":
    main()
