"""All about CIFAR-10 within a limit of seconds: nets side by side, beside them serving, then calm.

    CIFAR_SCANS=FOLDER python benchmarks/classes/cifar_all.py --seconds 500 --out FOLDER
    CIFAR_SCANS=FOLDER python benchmarks/classes/cifar_all.py --toy --out FOLDER

VGG-19 and ResNet-56 with three seeds each, a vision transformer and the controls train as two rows
of processes that share one GPU (`cifar_gpu.py`). Meanwhile `serving.py` has the cores that they do
not use; at the end, with nothing else running, parts are timed and served (`cifar_latency.py`).
``results.json``, ``table.md``, ``log.txt`` and ``outputs.zip`` in the folder are written anew as
things are finished. ``--toy`` tries it all on a processor in a few minutes, with a few images and
steps.
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
CALM_S = 45.0
"""Of the limit, for timings after all training."""
NETS = {
    # 18 times as fast as eager torch, by times that a process of its own takes in calm.
    "vgg19": ["--parts", "5", "--redundancy", "3", "--work", "0.095",
              "--train", "3500", "--train-limit", "36", "--retrain", "8000", "--rate", "0.15",
              "--batch", "256"],
    "resnet56": ["--parts", "5", "--redundancy", "3", "--ratio", "2.5", "--eager-ratio", "6",
                 "--train", "1400", "--train-rate", "0.05", "--train-limit", "28",
                 "--retrain", "8000", "--rate", "0.15", "--batch", "256"],
    "vit": ["--parts", "5", "--redundancy", "3", "--work", "0.085", "--optimizer", "adamw",
            "--train", "3000", "--train-rate", "1e-3", "--train-limit", "25", "--decay", "0.05",
            "--retrain", "4000", "--rate", "1e-3"],
}  # fmt: skip
ROWS = {
    "first": (("vgg19", 0.62, "split"), ("vit", 0.8, "split"), ("vgg19", 1.0, "controls")),
    "second": (("resnet56", 0.93, "split"), ("resnet56", 1.0, "controls")),
}
"""What is trained one after the other, each until a share of the time for training."""
SEEDS = {"vgg19": 3, "resnet56": 3, "vit": 1}
SERVING_AFTER_S = {"device": 15.0, "predict": 85.0, "kill": 85.0, "overhead": 85.0, "fan-out": 85.0}
"""When each trial may begin: timings not before the nets have fitted their parts."""
TOY = ["--device", "cpu", "--batch", "8", "--train", "2", "--retrain", "2"]
MOST_RETURNED_BYTES = 15 << 20


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
        """Whether its first process failed: then nothing is worth its time."""
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
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="cifar-"))
    asked.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("CIFAR_CACHE", str(work / "cache"))
    if asked.toy:
        os.environ["CIFAR_FEW"] = "40"
    decode()
    until_s = START_S + asked.seconds - CALM_S
    rows = training_rows(asked, work, until_s)
    serving = [] if asked.toy else [serving_row(work)]
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
    """Two rows of trainings, on two cores each where there are enough."""

    def command(net: str, share: float, kind: str) -> list[str]:
        seeds = range(SEEDS[net]) if kind == "split" else range(1)
        until = START_S + share * (until_s - START_S)
        return [str(HERE / "cifar_gpu.py"), "--net", net, "--seeds", *map(str, seeds),
                "--out", str(work), "--until", str(until), *NETS[net],
                *(["--only-controls"] if kind == "controls" else []),
                *(TOY if asked.toy else [])]  # fmt: skip

    cores = os.cpu_count() or 1
    return [
        Row(
            name,
            [(0.0, command(net, *how)) for net, *how in commands if net in asked.nets],
            work / f"{name}.log",
            {2 * place % cores, (2 * place + 1) % cores},
        )
        for place, (name, commands) in enumerate(ROWS.items())
    ]


def serving_row(work: Path) -> Row:
    commands = [
        (after_s, [str(HERE / "serving.py"), name, "--json", str(work / f"serving-{name}.json")])
        for name, after_s in SERVING_AFTER_S.items()
    ]
    cores = set(range(4, os.cpu_count() or 1)) or set(range(os.cpu_count() or 1))
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
        if any(row.is_broken for row in needed):
            break
        time.sleep(1.0)
    for row in rows:
        row.stop()
    gather(rows, work, out)
    return not any(row.is_broken for row in needed)


def gather(rows: list[Row], work: Path, out: Path) -> None:
    """Everything that is known, in a few files."""
    found = {path.stem: told for path in sorted(work.glob("*.json")) if (told := _read(path))}
    (out / "results.json").write_text(json.dumps(found))
    (out / "table.md").write_text("\n".join(table(found)) + "\n")
    logs = [f"── {path.stem}\n{path.read_text(errors='replace')[-20_000:]}"
            for path in sorted(work.glob("*.log"))]  # fmt: skip
    ends = " ".join(f"{row.name} {row.ends}" for row in rows)
    (out / "log.txt").write_text("\n".join([*logs, f"ends: {ends}"]))
    outputs = sorted(work.glob("*.outputs.npz"))
    with zipfile.ZipFile(out / "outputs.zip", "w") as bundle:
        for path in outputs:
            if sum(each.file_size for each in bundle.infolist()) < MOST_RETURNED_BYTES:
                bundle.write(path, path.name)


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
