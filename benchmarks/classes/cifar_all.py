"""All about CIFAR-10 within a limit of seconds: nets and seeds side by side, then calm timings.

    CIFAR_SCANS=FOLDER python benchmarks/classes/cifar_all.py --seconds 545 --out FOLDER
    CIFAR_SCANS=FOLDER python benchmarks/classes/cifar_all.py --toy --out FOLDER

VGG-19 and ResNet-56 with three seeds each and a vision transformer train as processes that share
one GPU (`cifar_gpu.py`); when they are done, parts are timed and served (`cifar_latency.py`), and
what time is left goes to `serving.py`. ``results.json``, ``table.md`` and ``log.txt`` in the folder
are written anew whenever something is finished. ``--toy`` tries it all on a processor in a minute
or two, with a few images and steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import cifar

HERE = Path(__file__).parent
START_S = time.time()
CALM_S = 110.0
"""Of the limit, for timings after all training."""
CONTROL_S = 75.0
"""Before that, for the controls, which need to know how many steps the parts had."""
# Shares of work: 18 times as fast as eager torch, and 2.5 times as fast as the same runtime, by
# times that were taken in calm; beside other trainings they cannot be fitted.
NETS = {
    "vgg19": ["--parts", "10", "--redundancy", "3", "--work", "0.085",
              "--train", "4000", "--retrain", "5000"],
    "resnet56": ["--parts", "5", "--redundancy", "2", "--work", "0.3",
                 "--train", "1500", "--train-rate", "0.05", "--retrain", "4000"],
    "vit": ["--parts", "10", "--redundancy", "3", "--work", "0.085", "--optimizer", "adamw",
            "--train-rate", "1e-3", "--rate", "1e-3", "--decay", "0.05",
            "--train", "3500", "--retrain", "3500"],
}  # fmt: skip
TOY = ["--device", "cpu", "--batch", "8", "--train", "2", "--retrain", "2"]


@dataclass
class Lane:
    """Commands one after the other, in processes of their own."""

    name: str
    commands: list[list[str]]
    log: Path
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
        command = self.commands.pop(0)
        environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command], stdout=log, stderr=subprocess.STDOUT,
                env=environment,
            )  # fmt: skip
        return True

    def stop(self) -> None:
        self.commands.clear()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=545.0)
    parser.add_argument("--seeds", type=int, default=3)
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
    run_lanes(lanes_of(asked, work, until_s), work, asked.out, until_s)
    run_lanes(calm_lanes(asked, work), work, asked.out, START_S + asked.seconds - 3)


def decode() -> None:
    if (cifar.cache() / "test.npz").is_file():
        return
    code = "import sys, cifar; cifar.decode(sys.argv[1])"
    running = [
        subprocess.Popen([sys.executable, "-c", code, name], cwd=HERE) for name in ("train", "test")
    ]
    if any(process.wait() for process in running):
        raise SystemExit("the scans could not be decoded")


def lanes_of(asked: argparse.Namespace, work: Path, until_s: float) -> list[Lane]:
    """A process for every net and seed, the controls after the first seed."""
    split_s = until_s - START_S - CONTROL_S
    train_limit = {"vgg19": 0.3, "resnet56": 0.2, "vit": 0.25}

    def command(net: str, seed: int, *more: str) -> list[str]:
        until = until_s if more else until_s - CONTROL_S
        return [str(HERE / "cifar_gpu.py"), "--net", net, "--seeds", str(seed), "--out", str(work),
                "--until", str(until), "--train-limit", str(train_limit[net] * split_s),
                *NETS[net], *more, *(TOY if asked.toy else [])]  # fmt: skip

    seeds = {"vgg19": asked.seeds, "resnet56": asked.seeds, "vit": 1}
    return [
        Lane(
            f"{net}-{seed}",
            [command(net, seed)] + [command(net, seed, "--only-controls")] * (seed == 0),
            work / f"{net}-{seed}.log",
        )
        for net in asked.nets
        for seed in range(seeds[net])
    ]


def calm_lanes(asked: argparse.Namespace, work: Path) -> list[Lane]:
    folders = [str(path.parent) for path in sorted(work.glob("*/table.json"))]
    timing = [str(HERE / "cifar_latency.py"), *folders, "--json", str(work / "latency.json")]
    if asked.toy:
        return [Lane("calm", [[*timing, "--few"]], work / "calm.log")]
    serving = [
        [str(HERE / "serving.py"), name, "--json", str(work / f"serving-{name}.json"), *more]
        for name, *more in (("kill", "--kills", "40"), ("overhead",), ("predict",), ("fan-out",))
    ]
    return [Lane("calm", [timing, *serving], work / "calm.log")]


def run_lanes(lanes: list[Lane], work: Path, out: Path, until_s: float) -> None:
    """All lanes at once, until they are done or time is over; results as they come."""
    while any([lane.step() for lane in lanes]) and time.time() < until_s:
        gather(lanes, work, out)
        time.sleep(1.0)
    for lane in lanes:
        lane.stop()
    gather(lanes, work, out)


def gather(lanes: list[Lane], work: Path, out: Path) -> None:
    """Everything that is known, in three files."""
    found = {path.stem: told for path in sorted(work.glob("*.json")) if (told := _read(path))}
    (out / "results.json").write_text(json.dumps(found))
    (out / "table.md").write_text("\n".join(table(found)) + "\n")
    logs = [f"── {path.stem}\n{path.read_text(errors='replace')[-20_000:]}"
            for path in sorted(work.glob("*.log"))]  # fmt: skip
    ends = " ".join(f"{lane.name} {lane.ends}" for lane in lanes)
    (out / "log.txt").write_text("\n".join([*logs, f"ends: {ends}"]))


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
