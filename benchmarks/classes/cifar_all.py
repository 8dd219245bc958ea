"""All about CIFAR-10 within a limit of seconds: nets side by side, beside them serving, then calm.

    CIFAR_SCANS=FOLDER python benchmarks/classes/cifar_all.py --seconds 500 --out FOLDER
    CIFAR_SCANS=FOLDER python benchmarks/classes/cifar_all.py --toy --out FOLDER

VGG-19 and ResNet-56 with three seeds each and a vision transformer, a process each (`cifar_gpu.py`)
that train in turn on one GPU. Meanwhile `serving.py` has the cores that they do not use; at the
end, with nothing else running, parts are timed and served (`cifar_latency.py`). ``--plan`` names
one of the plans below: what is trained, and for how long. ``results.json``, ``table.md``,
``log.txt``, ``outputs.zip`` and ``wholes-resnet56.zip`` (weights of the whole nets, which
`cifar_gpu.py` takes by ``--wholes``) in the folder are written anew as things
are finished. ``--toy`` tries it all on a processor in a few minutes, with a few images and steps.
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
IDLE_S = 36.0
"""Of the limit, when the GPU waits for images, starts and results."""
STARTS_S = 45.0
"""In which images are decoded and the whole nets of ResNet-56 are described and saved."""
SGD = ["--batch", "256", "--rate", "0.15", "--retrain", "20000"]
SMALL_BATCH = ["--batch", "128", "--rate", "0.1", "--retrain", "40000"]
ADAMW = ["--optimizer", "adamw", "--decay", "0.05", "--rate", "1e-3", "--retrain", "12000"]
VGG19 = [*SGD, "--train", "7000"]
RESNET56 = ["--train", "5000", "--train-rate", "0.05"]
VIT = [*ADAMW, "--work", "0.085", "--train", "6000", "--train-rate", "1e-3"]
THREE = ["--seeds", "0", "1", "2"]
RESNET56_PARTS = [*SGD, *RESNET56, *THREE, "--alike", "--parts", "5", "--redundancy", "4",
                  "--work", "0.345", "--kernels", "4"]  # fmt: skip
PLANS = {
    # Ten parts of VGG-19, so that any two of ten workers may die.
    "ten": {
        "vgg19": ((0.14, 0.25), [*VGG19, *THREE, "--parts", "10", "--redundancy", "5",
                                 "--ratio", "4", "--eager-ratio", "20",
                                 "--first-share", "0.075", "--kernels", "1"]),
        "resnet56": ((0.08, 0.34), [*SGD, *RESNET56, *THREE, "--parts", "5", "--redundancy", "4",
                                    "--ratio", "2.55", "--eager-ratio", "6.3",
                                    "--first-share", "0.35", "--kernels", "4"]),
        "vit": ((0.07, 0.12), [*VIT, "--seeds", "0", "--parts", "5", "--redundancy", "4"]),
    },
    # Five parts, whose kernels are those of one shape; only ResNet-56, which has many, is compiled.
    "five": {
        "vgg19": ((0.16, 0.37), [*VGG19, *THREE, "--alike", "--parts", "5", "--redundancy", "3",
                                 "--work", "0.086", "--kernels", "6"]),
        "resnet56": ((0.0, 0.47), [*SMALL_BATCH, *RESNET56, *THREE, "--alike", "--compile",
                                   "--parts", "5", "--redundancy", "3", "--work", "0.345",
                                   "--kernels", "4"]),
    },
    # One run: ResNet-56 from scratch, its parts, and its control when the whole nets are there.
    "scratch": {
        "resnet56": ((0.22, 0.575), [*RESNET56_PARTS, "--train-rate", "0.15", "--kernels", "6"]),
        "vgg19 ten": ((0.032, 0.065), [*VGG19, "--seeds", "0", "--parts", "10",
                                       "--redundancy", "8", "--work", "0.08", "--kernels", "1"]),
        "resnet56 control": ((0.0, 0.105), [*SGD, *RESNET56, "--seeds", "0", "--work", "0.345",
                                            "--kernels", "6", "--control-steps", "60000"]),
    },
    "controls": {
        "vgg19": ((0.15, 0.35), [*VGG19, "--seeds", "0", "--work", "0.086",
                                 "--control-steps", "25000"]),
        "resnet56": ((0.0, 0.5), [*SMALL_BATCH, *RESNET56, "--compile", "--seeds", "0",
                                  "--work", "0.345", "--control-steps", "40000"]),
    },
}  # fmt: skip
"""For each net its time on the GPU beside others', of nets and of parts, and its options."""
NETS = ("vgg19", "resnet56", "vit")
SERVING_AFTER_S = {"ten": 130.0, "five": 0.0}
"""When timings may begin in a plan: not before the nets have fitted their parts."""
TRIALS = {"ten": ("device", "fresh", "predict", "kill", "overhead", "fan-out"),
          "five": ("predict", "overhead", "fan-out")}  # fmt: skip
TOY = ["--device", "cpu", "--batch", "8", "--train", "2", "--retrain", "2", "--work", "0.1",
       "--no-compile"]  # fmt: skip
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
        environment = {"OMP_NUM_THREADS": "2", **os.environ, "PYTHONUNBUFFERED": "1"}
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
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--calm", type=float, default=42.0, help="seconds, for timings at the end")
    parser.add_argument("--plan", choices=tuple(PLANS), default="five")
    parser.add_argument("--form", nargs="*", choices=("compile",), default=[],
                        help="of the steps of ResNet-56")  # fmt: skip
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
    until_s = START_S + asked.seconds - asked.calm
    rows = training_rows(asked, work, until_s)
    serving = [serving_row(asked.plan, work)] if asked.plan in TRIALS and not asked.toy else []
    if not run_rows([*rows, *serving], rows, work, asked.out, until_s):
        raise SystemExit(f"a training failed: {asked.out / 'log.txt'}")
    if asked.calm:
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
    """One process for each net, on the first cores where there are enough."""
    rows, cores = [], os.cpu_count() or 1
    plan = {name: each for name, each in PLANS[asked.plan].items() if net_of(name) in asked.nets}
    shared_s = asked.seconds - asked.calm - IDLE_S
    unit_s = shared_s / sum(sum(shares) for shares, _ in plan.values())
    for place, (name, (shares, options)) in enumerate(plan.items()):
        limits = ("--train-limit", str(shares[0] * unit_s), "--retrain-limit",
                  str(shares[1] * unit_s))  # fmt: skip
        command = [str(HERE / "cifar_gpu.py"), "--net", net_of(name), "--out", str(work),
                   "--until", str(until_s), *options, *limits]  # fmt: skip
        if net_of(name) == "resnet56" and asked.plan != "five":
            command += [f"--{word}" for word in asked.form]
        command += TOY if asked.toy else []
        command += ["--control-steps", "2"] if asked.toy and "--control-steps" in options else []
        # The first net has its turn first: the others wait for as long as it takes to start.
        after_s = 2.0 * place
        if asked.plan == "scratch" and "control" in name:
            command += ["--wholes", str(work)]
            after_s = plan["resnet56"][0][0] * unit_s + STARTS_S
        mine = set(range(min(6 if asked.plan in TRIALS else 12, cores)))
        rows.append(Row(name, [(after_s, command)], work / f"{name}.log", mine))
    return rows


def net_of(name: str) -> str:
    """The net of a row, whose name may say more."""
    return name.partition(" ")[0]


def serving_row(plan: str, work: Path) -> Row:
    commands = [
        (SERVING_AFTER_S[plan],
         [str(HERE / "serving.py"), name, "--json", str(work / f"serving-{name}.json")])
        for name in TRIALS[plan]
    ]  # fmt: skip
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
    wholes = [path for path in sorted(work.glob("resnet56-*.npz")) if path.stem.count(".") == 0]
    bundle(out / "wholes-resnet56.zip", wholes)


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
