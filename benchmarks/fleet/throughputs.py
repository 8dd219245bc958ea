"""How good estimates of throughputs are, on held-out entries of Gavel's table.

python benchmarks/fleet/throughputs.py ../shared/data/cluster

Errors are |log(estimate / measured)|: 0.1 is about 10 %. Every job in turn is unseen, alone, with
the same job on other gangs, or with all jobs of its model. The constants were chosen on the first
table; the other two had little part in that, but share 71 % and 46 % of their entries with it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from gavel_cluster import DEVICE_TYPES, TABLE, model_of

from hocket.fleet.throughputs import Throughputs, read_throughputs
from hocket.fleet.throughputs.unseen import complete, conditional_row, expected_row

TABLES = (
    TABLE,
    "gavel/physical_cluster_throughputs.json",
    "shockwave/tacc_throughputs.json",
)


def show(name: str, errors: list[float]) -> None:
    """One line of the table."""
    quantiles = np.quantile(errors, (0.5, 0.9))
    print(f"{name:58} {quantiles[0]:7.3f} {quantiles[1]:7.3f} {len(errors):6}")


def alone(name: str, table: Throughputs, *, unseen: str) -> None:
    """Speeds on two device types from that on the third; the table has nothing of ``unseen``."""
    full = (table.alone > 0.0).all(axis=1)
    logs = np.log(np.where(full[:, None], table.alone, 1.0))
    gang = np.array([profile.gang for profile in table.profiles])
    names = {
        "job": np.arange(len(full)),
        "job type": np.array([profile.job_type for profile in table.profiles]),
        "model": np.array([model_of(profile.job_type) for profile in table.profiles]),
    }[unseen]
    ours, relative, plain, within = [], [], [], []
    for row in np.flatnonzero(full).tolist():
        seen, truth = np.asarray(full & (names != names[row])), logs[row]
        mean = logs[seen & (gang == gang[row])].mean(axis=0)
        profiles = [table.profiles[at] for at in np.flatnonzero(seen)]
        expected = expected_row(logs[seen], profiles, table.profiles[row])
        for column in range(len(DEVICE_TYPES)):
            asked = [at for at in range(len(DEVICE_TYPES)) if at != column]
            known = np.where(np.arange(len(DEVICE_TYPES)) == column, truth, np.nan)
            found = conditional_row(expected, known)
            guess, deviation = found.mean, found.deviation
            scaled = mean - mean[column] + truth[column]
            ours += np.abs(guess - truth)[asked].tolist()
            within += (np.abs(guess - truth) <= 2.0 * deviation)[asked].tolist()
            relative += np.abs(scaled - truth)[asked].tolist()
            plain += np.abs(mean - truth)[asked].tolist()
    what = f"{name}, {unseen} unseen"
    show(f"{what}: estimate", ours)
    show(f"{what}: mean ratio of device types", relative)
    show(f"{what}: mean of the device type", plain)
    print(f"{what}: {np.mean(within):.1%} within two deviations")


def pairs(table: Throughputs, measured_share: float) -> None:
    """Parts of their speed that unseen jobs keep beside others, a share of the pairs measured."""
    random = np.random.default_rng(0)
    single = [at for at, profile in enumerate(table.profiles) if profile.gang == 1]
    table = table.only(single)
    parts = table.beside / np.where(table.alone > 0.0, table.alone, np.inf)[:, None, :]
    parts = np.where(parts > 0.0, parts, np.nan)
    ours, plain = [], []
    for row in range(len(single)):
        is_hidden = random.random(parts.shape[1:]) >= measured_share
        known = parts.copy()
        known[row][is_hidden] = np.nan
        known[:, row][is_hidden] = np.nan
        known[row, row] = np.nan
        found = complete(known.reshape(len(single), -1)).reshape(parts.shape)[row]
        asked = is_hidden & np.isfinite(parts[row])
        asked[row] = False
        ours += np.abs(np.log(found[asked] / parts[row][asked])).tolist()
        mean = np.nanmean(np.delete(np.delete(parts, row, 0), row, 1))
        plain += np.abs(np.log(mean / parts[row][asked])).tolist()
    show(f"pairs, {measured_share:.0%} known: estimate", ours)
    show(f"pairs, {measured_share:.0%} known: mean share", plain)


def main(folder: Path) -> None:
    """Print everything."""
    print(f"{'':58} {'median':>7} {'90 %':>7} {'number':>6}")
    tables = [read_throughputs(folder / path).on(DEVICE_TYPES) for path in TABLES]
    for path, table in zip(TABLES, tables, strict=True):
        for unseen in ("job", "job type", "model"):
            alone(Path(path).stem, table, unseen=unseen)
    table = tables[0]
    for measured_share in (0.0, 0.1, 0.3):
        pairs(table, measured_share)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
