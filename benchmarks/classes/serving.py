"""Workers under the clock: fan-out, overhead over the slowest part, prediction, killed workers.

    python benchmarks/classes/serving.py [TRIAL ...] [--kills 200] [--json FILE]

Trials: fan-out, overhead, predict, kill, ray, fresh (one net in several processes). Needs the extra
``classes`` (and ``ray`` for that comparison). Sub-models are convolutions of random weights, whose
time does not depend on training, in front of scores that are known, so that every answer can be
checked. Wall time: run it on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cifar_latency import without_onnx_package
from serving_parts import SHAPE, Known, made_folder, quantiles, times_s

from hocket.classes.artefact import Folder
from hocket.classes.exported import as_onnx
from hocket.classes.latency_forecast import FanOut, answer_s
from hocket.classes.serving.dry_run import forecast_of
from hocket.classes.serving.front_end import FrontEnd, ServeOptions, siblings_of
from hocket.classes.session import infer, latency_s, open_session

SIZES = ("16x4", "32x6", "48x8", "64x10", "96x12")
"""Channels and layers of the convolutions."""


def fan_out() -> list[dict[str, Any]]:
    """Workers that compute nothing."""
    rows = []
    for count in (2, 4, 10):
        for spin_s in (0.0, 0.005):
            with tempfile.TemporaryDirectory() as path:
                folder = made_folder(Path(path), 2, 1, count)
            empty = Folder(folder.path, folder.table, {}, (b"",) * count)
            with FrontEnd(empty, ServeOptions(spin_s=spin_s)) as front_end:
                rows.append(
                    {"workers": count, "spin_s": spin_s, **quantiles(times_s(front_end, 2000))}
                )
            print(rows[-1], flush=True)
    return rows


def overhead() -> list[dict[str, Any]]:
    """Time of an answer beyond that of the slowest part: in a loop, rested, and in its worker.

    ``over_slowest`` compares with the slowest part of the same request, ``over_largest_median`` the
    median of answers with the largest median of a worker, whom others may be slower than each time.
    """
    rows = []
    for (width, depth), count in (((32, 6), 2), ((64, 10), 2), ((64, 10), 4), ((96, 12), 8)):
        for spin_s in (0.0, 0.005):
            with tempfile.TemporaryDirectory() as path:
                folder = made_folder(Path(path), width, depth, count)
            session = open_session(folder.models[0])
            image = np.zeros((1, *SHAPE), np.float32)
            alone_s = latency_s(session, image)
            rested = []
            for _ in range(100):
                time.sleep(0.001)
                start = time.perf_counter()
                infer(session, image)
                rested.append(time.perf_counter() - start)
            with FrontEnd(folder, ServeOptions(spin_s=spin_s)) as front_end:
                loop = quantiles(times_s(front_end, 400))
                metrics = front_end.metrics()
                inside = max(worker.compute.p50_s or 0 for worker in metrics.workers)
                apart = quantiles(times_s(front_end, 200, 0.001))
                rounds = [front_end.dry_run(image[0]) for _ in range(300)]
            over_us = [
                1e6 * took_s - 1e-3 * max(each.spent_ns for each in made.values())
                for took_s, made in rounds
            ]
            rows.append({
                "net": f"{width}x{depth}", "workers": count, "spin_s": spin_s,
                "alone_us": alone_s * 1e6, "alone_rested_us": float(np.median(rested)) * 1e6,
                "slowest_in_worker_us": inside * 1e6, "answer_p50_us": loop["p50_us"],
                "answer_p99_us": loop["p99_us"], "answer_rested_p50_us": apart["p50_us"],
                "over_slowest_us": float(np.median(over_us)),
                "over_slowest_p99_us": float(np.quantile(over_us, 0.99)),
                "over_largest_median_us": loop["p50_us"] - inside * 1e6,
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def predict(sizes: list[str]) -> list[dict[str, Any]]:
    """Predicted against measured, 20 nets and numbers of parts.

    By a dry run of the workers (`serve-classes`), and by the time of a part alone (`split`).
    """
    rows = []
    for width, depth in (map(int, size.split("x")) for size in sizes):
        for count in (1, 2, 3, 4):
            with tempfile.TemporaryDirectory() as path:
                folder = made_folder(Path(path), width, depth, count)
            alone_s = latency_s(open_session(folder.models[0]), np.zeros((1, *SHAPE), np.float32))
            planned_s = answer_s([alone_s] * count, len(os.sched_getaffinity(0)), FanOut())
            with FrontEnd(folder) as front_end:
                forecast = forecast_of(front_end)
                measured_s = float(np.median(times_s(front_end, 200, 0.001, 2.0)))
            rows.append({"net": f"{width}x{depth}", "parts": count,
                         "predicted_us": forecast.answer_s * 1e6, "measured_us": measured_s * 1e6,
                         "planned_us": planned_s * 1e6,
                         "error": forecast.answer_s / measured_s - 1,
                         "planned_error": planned_s / measured_s - 1})  # fmt: skip
            print(rows[-1], flush=True)
    for name in ("error", "planned_error"):
        errors = np.abs([row[name] for row in rows])
        print(f"{name}: median {np.median(errors):.1%}, worst {errors.max():.1%}, "
              f"within 10 %: {(errors <= 0.1).sum()} of {len(errors)}, "
              f"within 15 %: {(errors <= 0.15).sum()}", flush=True)  # fmt: skip
    return rows


FRESH = """
import os, sys, time, numpy
from hocket.classes.session import infer, open_session
os.sched_setaffinity(0, [int(sys.argv[2])])
session, image = open_session(sys.argv[1]), numpy.zeros((1, 3, 32, 32), "float32")
for burst in range(4):
    spent = []
    for _ in range(60):
        start = time.process_time_ns()
        infer(session, image)
        spent.append(time.process_time_ns() - start)
    print(numpy.quantile(spent[10:], 0.1) / 1e3)
    time.sleep(0.2)
"""
HUGE_PAGES = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824"
HUGE_PAGES += ":glibc.malloc.top_pad=33554432"


def fresh() -> list[dict[str, Any]]:
    """The same net in one process after the other: how much of a time is the process's own."""
    rows = []
    cores = sorted(os.sched_getaffinity(0))
    for width, depth in ((48, 8), (64, 10), (96, 12)):
        model = as_onnx(Known(width, depth, torch.zeros(3, 64)), torch.zeros(1, *SHAPE))
        with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
            file.write(model)
            file.flush()
            for number in range(8):
                pages = HUGE_PAGES if number % 2 else ""
                core = cores[-1 - number // 2 % 2]
                done = subprocess.run(
                    [sys.executable, "-c", FRESH, file.name, str(core)], stdout=subprocess.PIPE,
                    text=True, check=True, env={**os.environ, "GLIBC_TUNABLES": pages},
                )  # fmt: skip
                bursts_us = [round(float(each), 1) for each in done.stdout.split()]
                rows.append({"net": f"{width}x{depth}", "huge_pages": bool(pages), "core": core,
                             "bursts_us": bursts_us})  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def kill(kills: int = 200) -> dict[str, Any]:
    """A worker of ten is killed in mid-request, 200 times; then two stay dead."""
    rng = np.random.default_rng(0)
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as path:
        folder = made_folder(Path(path), 32, 6, 10, redundancy=3)
    truth = torch.randn(10, 64, generator=torch.Generator().manual_seed(0)).numpy()

    def ask(front_end: FrontEnd) -> tuple[float, bool]:
        image = rng.normal(size=SHAPE).astype(np.float32)
        answer = front_end.predict(image)
        right = int((truth @ image[0, :8, :8].flatten()).argmax())
        return answer.took_s, answer.label == right and not answer.missing

    with FrontEnd(folder, ServeOptions(deadline_s=5)) as front_end:
        calm = [ask(front_end) for _ in range(1000)]
        slowest_s = float(np.quantile([took for took, _ in calm], 0.99))
        killed, killer = [], _Killer()
        for _ in range(kills):
            until_s = time.monotonic() + 60
            while front_end.num_alive < 10 and time.monotonic() < until_s:
                time.sleep(0.01)
            victim = chance.choice(front_end.process_ids)
            delay_s = chance.random() * np.median([took for took, _ in calm])
            killer.kill(victim, delay_s)
            killed.append(ask(front_end))
            killer.wait()
            time.sleep(0.12)  # until the death is known
        killer.end()
        deaths = sum(worker.deaths for worker in front_end.metrics().workers)
    with FrontEnd(folder, ServeOptions(deadline_s=5, restarts=False)) as front_end:
        for index in (2, 7):
            os.kill(front_end.process_ids[index], signal.SIGKILL)
        two_dead = [ask(front_end) for _ in range(500)]
    took = np.array([each for each, _ in killed])
    result = {
        "calm_p50_us": float(np.median([each for each, _ in calm])) * 1e6,
        "calm_p99_us": slowest_s * 1e6,
        "calm_right": sum(right for _, right in calm) / len(calm),
        "killed_right": f"{sum(right for _, right in killed)} of {len(killed)}",
        "killed_worst_us": float(took.max()) * 1e6,
        "within_p99_plus_5ms": f"{int((took <= slowest_s + 0.005).sum())} of {len(took)}",
        "deaths": deaths,
        "two_dead_right": f"{sum(right for _, right in two_dead)} of {len(two_dead)}",
    }
    print(json.dumps(result, indent=1), flush=True)
    return result


class _Killer:
    """Kills a process a moment after it is told to; a small process of its own, started before.

    A fork of this one would make it copy every page that it writes while an answer is timed.
    """

    CODE = (
        "import os, sys, time\n"
        "for line in sys.stdin:\n"
        "    victim, delay_s = line.split()\n"
        "    time.sleep(float(delay_s)); os.kill(int(victim), 9); print(flush=True)\n"
    )

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", self.CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def kill(self, victim: int, delay_s: float) -> None:
        self._process.stdin.write(f"{victim} {delay_s}\n".encode())
        self._process.stdin.flush()

    def wait(self) -> None:
        self._process.stdout.readline()

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def ray_actors() -> list[dict[str, Any]]:
    """The same fan-out with Ray actors: one image to four, four floats back."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)

    @ray.remote(num_cpus=0.5)
    class Actor:
        def answer(self, image: np.ndarray) -> np.ndarray:
            return np.zeros(4, np.float32)

    actors = [Actor.remote() for _ in range(4)]
    image = np.zeros(SHAPE, np.float32)
    found = []
    for _ in range(300):
        start = time.perf_counter()
        reference = ray.put(image)
        ray.get([actor.answer.remote(reference) for actor in actors])
        found.append(time.perf_counter() - start)
    ray.shutdown()
    with tempfile.TemporaryDirectory() as path:
        folder = made_folder(Path(path), 2, 1, 4)
    empty = Folder(folder.path, folder.table, {}, (b"",) * 4)
    with FrontEnd(empty) as front_end:
        ours = times_s(front_end, 2000)
    rows = [{"ray": quantiles(np.array(found[20:]))}, {"hocket": quantiles(ours)},
            {"ratio_p50": float(np.median(found[20:]) / np.median(ours))}]  # fmt: skip
    for row in rows:
        print(row, flush=True)
    return rows


TRIALS = {
    "fresh": fresh,
    "fan-out": fan_out,
    "overhead": overhead,
    "predict": predict,
    "kill": kill,
    "ray": ray_actors,
}


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trials", nargs="*", default=["fan-out", "overhead", "predict", "kill"])
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help="of the nets of predict")
    asked = parser.parse_args()
    without_onnx_package()
    torch.set_num_threads(1)
    threads = sorted({siblings_of(core) for core in os.sched_getaffinity(0)})
    machine = platform.processor() or platform.machine()
    found = {"machine": machine, "cores": os.cpu_count(), "threads": threads}
    print(found, flush=True)
    for name in asked.trials:
        print(f"── {name}", flush=True)
        more = {"kill": [asked.kills], "predict": [asked.sizes]}.get(name, [])
        found[name] = TRIALS[name](*more)
        if asked.json is not None:
            asked.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
