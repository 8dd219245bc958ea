"""How good estimates of throughputs are, on held-out entries of Gavel's table.

python benchmarks/fleet_throughputs.py ../shared/data/cluster

Errors are |log(estimate / measured)|: 0.1 is about 10 %. Every job in turn is unseen, alone or with
all jobs of its model. The constants of `conditional_row` were chosen on the first table; the other
two had no part in that, but share 71 % and 46 % of their entries with it. Last, predictions for
ResNet-50 on one device beside what Gavel measured, in steps per second (capturing needs torch).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from hocket.fleet.throughputs import Throughputs, read_throughputs
from hocket.fleet.throughputs.conditional import conditional_row
from hocket.fleet.throughputs.unseen import with_unseen_job

KINDS = ("v100", "p100", "k80")
TABLES = (
    "gavel/simulation_throughputs.json",
    "gavel/physical_cluster_throughputs.json",
    "shockwave/tacc_throughputs.json",
)


def without(table: Throughputs, row: int) -> Throughputs:
    """The table as it was before a job came."""
    keep = [at for at in range(len(table.profiles)) if at != row]
    return Throughputs(
        kinds=table.kinds,
        profiles=tuple(table.profiles[at] for at in keep),
        alone=table.alone[keep],
        beside=table.beside[np.ix_(keep, keep)],
    )


def show(name: str, errors: list[float]) -> None:
    """One line of the table."""
    quantiles = np.quantile(errors, (0.5, 0.9))
    print(f"{name:58} {quantiles[0]:7.3f} {quantiles[1]:7.3f} {len(errors):6}")


def alone(name: str, table: Throughputs, *, leaves_model_out: bool) -> None:
    """Speeds on two kinds from that on the third."""
    full = (table.alone > 0.0).all(axis=1)
    logs = np.log(np.where(full[:, None], table.alone, 1.0))
    gang = np.array([profile.gang for profile in table.profiles])
    model = np.array([profile.job_type.split(" (")[0] for profile in table.profiles])
    ours, relative, plain = [], [], []
    for row in np.flatnonzero(full).tolist():
        seen = full & (model != model[row] if leaves_model_out else np.arange(len(full)) != row)
        alike = logs[seen & (gang == gang[row])]
        for column in range(len(KINDS)):
            asked = [at for at in range(len(KINDS)) if at != column]
            known = np.where(np.arange(len(KINDS)) == column, logs[row], np.nan)
            guess, mean, truth = conditional_row(alike, known)[0], alike.mean(axis=0), logs[row]
            scaled = mean - mean[column] + truth[column]
            ours += np.abs(guess - truth)[asked].tolist()
            relative += np.abs(scaled - truth)[asked].tolist()
            plain += np.abs(mean - truth)[asked].tolist()
    what = f"{name}, {'model' if leaves_model_out else 'job'} unseen"
    show(f"{what}: estimate", ours)
    show(f"{what}: mean ratio of kinds", relative)
    show(f"{what}: mean of the kind", plain)


def pairs(table: Throughputs, measured_share: float) -> None:
    """Speeds beside other jobs on one device, a share of the pairs measured."""
    random = np.random.default_rng(0)
    single = [at for at, profile in enumerate(table.profiles) if profile.gang == 1]
    ours, plain = [], []
    for row in single:
        known, beside, hidden = without(table, row), {}, []
        for other in (at for at in single if at != row):
            for column, kind in enumerate(table.kinds):
                pair = (table.beside[row, other, column], table.beside[other, row, column])
                if random.random() < measured_share:
                    beside[kind, table.profiles[other]] = pair
                elif pair[0] > 0.0:
                    hidden.append((other - (other > row), column, pair[0]))
        rates = dict(zip(table.kinds, table.alone[row], strict=True))
        found = with_unseen_job(known, table.profiles[row], rates, beside).throughputs
        shares = known.beside / np.where(known.alone > 0.0, known.alone, np.inf)[:, None, :]
        mean = shares[shares > 0.0].mean()
        for other, column, truth in hidden:
            guess = found.beside[-1, other, column]
            ours.append(float(abs(np.log(guess / truth))) if guess > 0.0 else 3.0)
            plain.append(float(abs(np.log(mean * table.alone[row, column] / truth))))
    show(f"pairs, {measured_share:.0%} known: estimate", ours)
    show(f"pairs, {measured_share:.0%} known: mean share", plain)


def predicted(table: Throughputs) -> None:
    """ResNet-50 as hocket predicts it and as Gavel measured it, steps per second."""
    from hocket.capture import capture, load_model
    from hocket.fleet.throughputs.predict import predict_throughputs
    from hocket.fleet.throughputs.servers import find_servers

    for batch in (16, 32, 64):
        model, data = load_model("resnet50", batch=batch, seq=None, dtype=None, device="meta")
        graph = capture(model, data, optimizer="sgd", name="resnet50")
        ours = predict_throughputs(graph, [find_servers(kind) for kind in KINDS]).alone[0]
        measured = table.alone[table.find(f"ResNet-50 (batch size {batch})", 1)]
        cells = [
            f"{kind} {a:.2f} / {b:.2f}" for kind, a, b in zip(KINDS, ours, measured, strict=True)
        ]
        print(f"ResNet-50, batch {batch}: " + ", ".join(cells))


def main(folder: Path) -> None:
    """Print everything."""
    print(f"{'':58} {'median':>7} {'90 %':>7} {'number':>6}")
    tables = [read_throughputs(folder / path).on(KINDS) for path in TABLES]
    for path, table in zip(TABLES, tables, strict=True):
        for leaves_model_out in (False, True):
            alone(Path(path).stem, table, leaves_model_out=leaves_model_out)
    table = tables[0]
    for measured_share in (0.0, 0.1, 0.3):
        pairs(table, measured_share)
    predicted(table)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
