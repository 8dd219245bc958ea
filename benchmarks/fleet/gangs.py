"""Predicted throughputs of gangs beside what Gavel measured, over all rows of its table.

python benchmarks/fleet/gangs.py ../shared/data/cluster [--rows]

Errors are |log(predicted / measured)|: 0.1 is about 10 %. Three columns: nothing but the models and
the device types are known; the links of the servers too; the speed of one device too. What the
links of Gavel's servers do is not published: the network and one figure per type were chosen so
that the median error is smallest, four numbers for 333 entries. The last lines do the same
for gangs of T4 that Pollux measured, one per server, with one number for each model. Needs torch.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
from gavel_cluster import BATCHES, DEVICE_TYPES, TABLE
from gavel_models import gavel_graph

from hocket.cost.collectives import RingPath, ring_all_reduce_s
from hocket.cost.parallel.efficiency import CONSTANTS
from hocket.fleet.throughputs import Throughputs, read_throughputs
from hocket.fleet.throughputs.predict import Gradients, exposed_s, predict
from hocket.fleet.throughputs.servers import SPREAD, Servers, find_servers

GANGS = (1, 2, 4, 8)
NETWORK_BPS = 0.8e9
LINK = {"v100": "2.6GB/s", "p100": "2.6GB/s", "k80": "0.75GB/s"}
POLLUX = {"imagenet": "ResNet-50", "cifar10": "ResNet-18"}


def described(folder: Path) -> list[Servers]:
    """Servers of eight whose devices reach each other as fast as Gavel's seem to have."""
    found = []
    for device_type, bandwidth in LINK.items():
        hardware = find_servers(device_type).hardware
        devices = f'[[devices]]\nkind = "{hardware}"\ncount = 8\n'
        ends = ", ".join(f'["gpu{at}", "host"]' for at in range(8))
        links = f'[[links]]\nbetween = [{ends}]\nbandwidth = "{bandwidth}"\nlatency = "5us"\n'
        path = folder / f"{device_type}.toml"
        path.write_text(f'name = "{device_type}"\n{devices}{links}')
        found.append(find_servers(f"{device_type}={path}", NETWORK_BPS))
    return found


def predictions(folder: Path, table: Throughputs, model: str, batch: int) -> list[Throughputs]:
    """The three predictions for one model and batch."""
    graph, servers = gavel_graph(model, batch), described(folder)
    row = table.alone[table.find(graph.name, 1)]
    measured = {
        device_type: row[table.device_types.index(device_type)] for device_type in DEVICE_TYPES
    }
    plain = [replace(find_servers(device_type), name=device_type) for device_type in DEVICE_TYPES]
    return [
        predict(graph, plain, GANGS).throughputs,
        predict(graph, servers, GANGS).throughputs,
        predict(graph, servers, GANGS, measured=measured).throughputs,
    ]


def compare(table: Throughputs, folder: Path) -> dict[tuple[str, str, int], list[list[float]]]:
    """Measured and predicted speeds by model, device type and gang."""
    found: dict[tuple[str, str, int], list[list[float]]] = {}
    for model, batches in BATCHES.items():
        for batch in batches:
            guesses = predictions(folder, table, model, batch)
            name = f"{model} (batch size {batch})"
            for gang in GANGS:
                for column, device_type in enumerate(table.device_types):
                    truth = table.alone[table.find(name, gang), column]
                    entry = [guess.on(table.device_types).alone[:, column] for guess in guesses]
                    told = [truth, *(float(row[GANGS.index(gang)]) for row in entry)]
                    if truth > 0.0 and min(told) > 0.0 and not (gang == 1 and "_" in device_type):
                        found.setdefault((model, device_type, gang), []).append([batch, *told])
    return found


def show(title: str, entries: list[list[float]]) -> None:
    """Median and 90 % of the errors of the three predictions."""
    _, truth, *guesses = np.array(entries).T
    cells = []
    for guess in guesses:
        errors = np.abs(np.log(guess / truth))
        cells.append(f"{np.median(errors):6.2f} ({np.quantile(errors, 0.9):4.2f})")
    print(f"{title:38} {len(truth):4} " + "   ".join(cells))


def summary(found: dict[tuple[str, str, int], list[list[float]]]) -> None:
    """Errors by placement, device type and model."""
    print(f"{'':38} {'rows':>4} nothing known    links known    speed of one known")
    everything = [(key, entry) for key, entries in found.items() for entry in entries]
    for placement, is_there in (("one device", False), ("gangs", True)):
        for device_type in sorted({key[1] for key in found}):
            some = [
                e for key, e in everything if key[1] == device_type and (key[2] > 1) == is_there
            ]
            if some:
                show(f"{placement}, {device_type}", some)
    for model in BATCHES:
        for suffix, what in (("_unconsolidated", "spread"), ("", "together")):
            some = [
                e
                for key, e in everything
                if key[0] == model
                and key[2] > 1
                and key[1] in {device_type + suffix for device_type in DEVICE_TYPES}
            ]
            show(f"gangs {what}, {model}", some)
    show("gangs spread", [e for key, e in everything if key[2] > 1 and "_" in key[1]])
    show("gangs together", [e for key, e in everything if key[2] > 1 and "_" not in key[1]])


def rows(found: dict[tuple[str, str, int], list[list[float]]]) -> None:
    """Every row of the table."""
    print("steps per second: measured, predicted with nothing, links, speed of one known")
    for (model, device_type, gang), entries in found.items():
        for batch, *told in entries:
            cells = " ".join(f"{speed:9.3f}" for speed in told)
            print(f"{model:12} {batch:4.0f} {device_type:20} gang {gang} {cells}")


def rules(table: Throughputs) -> None:
    """Spread gangs from the speed of one device, in buckets and as if sums hid behind two thirds of
    the step: the best network for each rule, and the error that is left."""
    entries = []
    for model, batches in BATCHES.items():
        for batch in batches:
            graph = gavel_graph(model, batch)
            for step in predict(
                graph, [find_servers(device_type) for device_type in DEVICE_TYPES]
            ).steps:
                at = table.device_types.index(step.servers.name)
                one_s = 1.0 / table.alone[table.find(graph.name, 1), at]
                buckets = step.gradients.scaled(one_s / step.step_s)
                spread = table.device_types.index(step.servers.name + SPREAD)
                for gang in GANGS[1:]:
                    truth = table.alone[table.find(graph.name, gang), spread]
                    if truth > 0.0:
                        entries.append((one_s, buckets, gang, truth))
    for name, more_s in (("buckets", _in_buckets), ("two thirds of the step", _behind_two_thirds)):
        found = []
        for network_bps in np.geomspace(0.2e9, 5e9, 60).tolist():
            path = RingPath(latency_s=20e-6, bandwidth_bps=network_bps)
            errors = [
                abs(np.log(gang / (one_s + more_s(one_s, buckets, gang, path)) / truth))
                for one_s, buckets, gang, truth in entries
            ]
            found.append((*np.quantile(errors, (0.5, 0.9)).tolist(), network_bps))
        median, most, network_bps = min(found)
        print(
            f"spread, hidden by {name}: {median:.3f} ({most:.2f}) at {network_bps / 1e9:.2f} GB/s"
        )


def _in_buckets(one_s: float, buckets: Gradients, gang: int, path: RingPath) -> float:
    return exposed_s(buckets, gang, path)


def _behind_two_thirds(one_s: float, buckets: Gradients, gang: int, path: RingPath) -> float:
    whole_s = float(ring_all_reduce_s(buckets.total_bytes, gang, *astuple(path)))
    return max(CONSTANTS.never_hidden * whole_s, whole_s - 2 / 3 * one_s)


def pollux(folder: Path) -> None:
    """Gangs of one T4 per server: the best network for each model, and the error that is left."""
    for application, model in POLLUX.items():
        with (folder / application / "placements.csv").open() as file:
            lines = list(csv.DictReader(file))
        alone = {x["local_bsz"]: float(x["step_time"]) for x in lines if x["placement"] == "1"}
        gangs = [x for x in lines if set(x["placement"]) == {"1"} and len(x["placement"]) > 1]
        step = predict(gavel_graph(model, 64), [find_servers("t4")]).steps[0]
        best = (np.inf, 0.0, 0.0)
        for network_bps in np.geomspace(0.1e9, 10e9, 60).tolist():
            errors = []
            for line in gangs:
                one_s = alone[line["local_bsz"]]
                path = RingPath(latency_s=20e-6, bandwidth_bps=network_bps)
                buckets = step.gradients.scaled(one_s / step.step_s)
                total_s = one_s + exposed_s(buckets, len(line["placement"]), path)
                errors.append(abs(np.log(total_s / float(line["step_time"]))))
            median, most = np.quantile(errors, (0.5, 0.9)).tolist()
            best = min(best, (median, most, network_bps))
        print(f"Pollux, {model}: {best[0]:.3f} ({best[1]:.3f}) at {best[2] / 1e9:.2f} GB/s, "
              f"{len(gangs)} entries")  # fmt: skip


def main(folder: Path, shows_rows: bool) -> None:
    """Print everything."""
    table = read_throughputs(folder / TABLE)
    with tempfile.TemporaryDirectory() as servers:
        found = compare(table, Path(servers))
    if shows_rows:
        rows(found)
    summary(found)
    rules(table)
    pollux(folder / "pollux" / "traces")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--rows" in sys.argv)
