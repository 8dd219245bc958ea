"""All about CIFAR-10 within a limit of seconds: nets side by side, beside them serving, then calm.

    CIFAR_SCANS=FOLDER python benchmarks/classes/cifar_all.py --seconds 500 --out FOLDER
    CIFAR_SCANS=FOLDER python benchmarks/classes/cifar_all.py --toy --out FOLDER

VGG-19 and ResNet-56 with three seeds each and a vision transformer, a process each (`cifar_gpu.py`)
that train in turn on one GPU. Meanwhile `serving.py` has the cores that they do not use; at the
end, with nothing else running, parts are timed and served (`cifar_latency.py`). ``--plan`` names
one of the plans below: what is trained, and for how long. ``results.json``, ``table.md``,
``log.txt``, ``outputs.zip`` and ``wholes-*.zip`` (weights of small nets, which ``--wholes`` of a
later run takes, unpacked) in the folder are written anew as things are finished. ``--toy`` tries it
all on a processor in a few minutes, with a few images and steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import cifar

HERE = Path(__file__).parent
START_S = time.time()
CALM_S = 50.0
"""Of the limit, for timings after all training."""
SGD = ["--batch", "256", "--rate", "0.15", "--retrain", "12000"]
ADAMW = ["--optimizer", "adamw", "--decay", "0.05", "--rate", "1e-3", "--retrain", "12000"]
NETS = {
    # 18 times as fast as eager torch; ten parts, so that any two of ten workers may die.
    "vgg19": [*SGD, "--parts", "10", "--redundancy", "5", "--ratio", "4", "--eager-ratio", "20",
              "--first-share", "0.075", "--train", "7000", "--kernels", "1"],
    "resnet56": [*SGD, "--parts", "5", "--redundancy", "4", "--ratio", "2.55",
                 "--eager-ratio", "6.3", "--first-share", "0.35", "--train", "5000",
                 "--train-rate", "0.05", "--kernels", "4"],
    "vit": [*ADAMW, "--parts", "5", "--redundancy", "4", "--work", "0.085", "--train", "6000",
            "--train-rate", "1e-3"],
}  # fmt: skip
PLANS = {
    "split": {
        "vgg19": ["--seeds", "0", "1", "2", "--train-limit", "55", "--retrain-limit", "95"],
        "resnet56": ["--seeds", "0", "1", "2", "--train-limit", "30", "--retrain-limit", "130"],
        "vit": ["--seeds", "0", "--train-limit", "25", "--retrain-limit", "45"],
    },
    "controls": {
        "vgg19": ["--seeds", "0", "--train-limit", "15", "--retrain-limit", "20", "--control"],
        "resnet56": ["--seeds", "0", "--retrain-limit", "40", "--control"],
    },
}
"""Seconds on the GPU; they must add up to less than the limit."""
SERVING_AFTER_S = {"device": 60.0, "fresh": 130.0, "predict": 130.0, "kill": 130.0,
                   "overhead": 130.0, "fan-out": 130.0}  # fmt: skip
"""When each trial may begin: timings not before the nets have fitted their parts."""
TOY = ["--device", "cpu", "--batch", "8", "--train", "2", "--retrain", "2", "--work", "0.1"]
MOST_RETURNED_BYTES = 15 << 20
SMALL_NETS = ("resnet56", "vit")


@dataclass
class Row:
    """Commands one after the other, in processes of their own, on some cores."""

    name: str
    commands: list[tuple[float, list[str]]]
    """Each with the seconds after which it may begin."""
    log: Path
    cores: set[int]
    process: subprocess.Popen[bytes] | None = None
    ends: list[int] = field(default_factory=list)

    def step(self) -> bool:
        """Start what comes next; whether anything is left."""
        if self.process is not None:
            if self.process.poll() is None:
                return True
            self.ends.append(self.process.returncode)
            self.process = None
        if not self.commands:
            return False
        after_s, command = self.commands[0]
        if time.time() - START_S < after_s:
            return True
        self.commands.pop(0)
        environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command], stdout=log, stderr=subprocess.STDOUT,
                env=environment,
            )  # fmt: skip
        os.sched_setaffinity(self.process.pid, self.cores)
        return True

    @property
    def is_broken(self) -> bool:
        """Whether its first process failed."""
        return bool(self.ends) and self.ends[0] != 0

    def stop(self) -> None:
        self.commands.clear()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--nets", nargs="+", choices=tuple(NETS), default=list(NETS))
    parser.add_argument("--plan", choices=tuple(PLANS), default="split")
    parser.add_argument("--wholes", type=Path, default=None, help="weights of an earlier run")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="cifar-"))
    asked.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("CIFAR_CACHE", str(work / "cache"))
    os.environ["GPU_TURN"] = str(work / "turn")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if asked.toy:
        os.environ["CIFAR_FEW"] = "40"
    decode()
    until_s = START_S + asked.seconds - CALM_S
    rows = training_rows(asked, work, until_s)
    serving = [serving_row(work)] if asked.plan == "split" and not asked.toy else []
    if not run_rows([*rows, *serving], rows, work, asked.out, until_s):
        raise SystemExit(f"a training failed: {asked.out / 'log.txt'}")
    run_rows([calm_row(asked, work)], [], work, asked.out, START_S + asked.seconds - 3)


def decode() -> None:
    if (cifar.cache() / "test.npz").is_file():
        return
    code = "import sys, cifar; cifar.decode(sys.argv[1])"
    running = [
        subprocess.Popen([sys.executable, "-c", code, name], cwd=HERE) for name in ("train", "test")
    ]
    if any(process.wait() for process in running):
        raise SystemExit("the scans could not be decoded")


def training_rows(asked: argparse.Namespace, work: Path, until_s: float) -> list[Row]:
    """One process for each net, on a core or two of its own where there are enough."""
    rows, cores = [], os.cpu_count() or 1
    for place, (net, plan) in enumerate(PLANS[asked.plan].items()):
        if net not in asked.nets:
            continue
        command = [str(HERE / "cifar_gpu.py"), "--net", net, "--out", str(work),
                   "--until", str(until_s), *NETS[net], *plan]  # fmt: skip
        command += TOY if asked.toy else []
        if asked.wholes is not None:
            command += ["--wholes", str(asked.wholes)]
        mine = {2 * place % cores, (2 * place + 1) % cores}
        # The first net has its turn first: the others wait for as long as it takes to start.
        rows.append(Row(net, [(2.0 * place, command)], work / f"{net}.log", mine))
    return rows


def serving_row(work: Path) -> Row:
    commands = [
        (after_s, [str(HERE / "serving.py"), name, "--json", str(work / f"serving-{name}.json")])
        for name, after_s in SERVING_AFTER_S.items()
    ]
    cores = set(range(6, os.cpu_count() or 1)) or set(range(os.cpu_count() or 1))
    return Row("serving", commands, work / "serving.log", cores)


def calm_row(asked: argparse.Namespace, work: Path) -> Row:
    folders = sorted((path.parent for path in work.glob("*/table.json")),
                     key=lambda path: (not path.name.endswith("-0"), path.name))  # fmt: skip
    timing = [str(HERE / "cifar_latency.py"), *map(str, folders),
              "--json", str(work / "latency.json")]  # fmt: skip
    cores = set(range(os.cpu_count() or 1))
    return Row("calm", [(0.0, timing + ["--few"] * asked.toy)], work / "calm.log", cores)


def run_rows(rows: list[Row], needed: list[Row], work: Path, out: Path, until_s: float) -> bool:
    """All rows at once, until they are done, time is over or a needed one is broken."""
    while any([row.step() for row in rows]) and time.time() < until_s:
        gather(rows, work, out)
        if needed and all(row.is_broken for row in needed):
            break
        time.sleep(1.0)
    for row in rows:
        row.stop()
    gather(rows, work, out)
    return not needed or not all(row.is_broken for row in needed)


def gather(rows: list[Row], work: Path, out: Path) -> None:
    """Everything that is known, in a few files."""
    found = {path.stem: told for path in sorted(work.glob("*.json")) if (told := _read(path))}
    (out / "results.json").write_text(json.dumps(found))
    (out / "table.md").write_text("\n".join(table(found)) + "\n")
    logs = [f"── {path.stem}\n{path.read_text(errors='replace')[-20_000:]}"
            for path in sorted(work.glob("*.log"))]  # fmt: skip
    ends = " ".join(f"{row.name} {row.ends}" for row in rows)
    (out / "log.txt").write_text("\n".join([*logs, f"ends: {ends}"]))
    bundle(out / "outputs.zip", sorted(work.glob("*.outputs.npz")))
    for net in SMALL_NETS:
        wholes = [path for path in sorted(work.glob(f"{net}-*.npz")) if path.stem.count(".") == 0]
        bundle(out / f"wholes-{net}.zip", wholes)


def bundle(path: Path, files: list[Path]) -> None:
    """Some files as one, as far as it may grow."""
    with zipfile.ZipFile(path, "w") as whole:
        for each in files:
            if (
                sum(e.file_size for e in whole.infolist()) + each.stat().st_size
                < MOST_RETURNED_BYTES
            ):
                whole.write(each, each.name)


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def table(found: dict) -> list[str]:
    """Accuracies of every net and seed, and the means."""
    lines = ["| net, seed | whole, test | parts, test | lost | standard error | 1 lost, worst | "
             "2 lost, worst | largest part: work, parameters | steps |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    lost_by_net: dict[str, list[float]] = {}
    for name, told in found.items():
        if "parts" not in told or ".split" not in name:
            continue
        parts = told["parts"]
        lost_by_net.setdefault(told["net"], []).append(parts["lost_points"])
        worst = {each["lost"]: f"{100 * each['worst']:.2f}" for each in parts["lost_workers"]}
        size = max(parts["parameters"]) / told["whole"]["parameters"]
        lines.append(
            f"| {told['net']}, {told['seed']} | {100 * told['whole']['test']:.2f} | "
            f"{100 * parts['test']:.2f} | {parts['lost_points']:+.2f} | "
            f"{parts['paired_error_points']:.2f} | {worst.get(1)} | {worst.get(2)} | "
            f"{max(parts['work']):.3f}, {size:.3f} | {parts['steps']} |"
        )
    lines += [
        f"\n{net}: {sum(lost) / len(lost):+.2f} points lost on the mean of {len(lost)} seeds, "
        f"{min(lost):+.2f} to {max(lost):+.2f}"
        for net, lost in lost_by_net.items()
    ]
    return lines


if __name__ == "__main__":
    main()
