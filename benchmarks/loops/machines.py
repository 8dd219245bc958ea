"""One loop on several machines: Ray workers in network namespaces, the bits of one thread.

Every host is a namespace with a Ray node of its own and a link held to a rate
(benchmarks/testbed.py); the caller runs on the first. Matrix factorisation (a rotation), a
wavefront and a sum go through `backend="ray"`; with ``--kill`` a machine dies in the middle of a
pass.

sudo python benchmarks/loops/machines.py [--hosts 4] [--mbit 1000] [--ratings 200000] [--kill]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

TOP = Path(__file__).parents[2]
sys.path.insert(0, str(TOP / "benchmarks"))
sys.path.insert(0, str(TOP / "benchmarks" / "loops"))
_PORT = 6399


def follow(options: argparse.Namespace) -> None:
    """On the first host: every loop on Ray and in turn, and where its workers were."""
    import ray
    from matrix_factorisation import data, start
    from stencils import gauss_seidel

    import hocket

    sys.path.insert(0, str(TOP / "examples"))
    from loops_mf import sgd, squared_error

    from hocket.loops.backends import ray_workers, row_store

    for left in range(30, -1, -1):
        try:
            ray.init(address=options.address, log_to_driver=False)
            break
        except Exception:
            if not left:
                raise
            time.sleep(4)
    while sum(node["Alive"] for node in ray.nodes()) < options.hosts:
        time.sleep(1)
    places: list[str] = []
    moved: list[int] = []
    run_tiles = ray_workers._run_tiles

    def looking(engine, job, members, *rest):
        ask = [
            each.__ray_call__.remote(lambda _: ray.util.get_node_ip_address()) for each in members
        ]
        places[:] = engine.get(ask)
        return run_tiles(engine, job, members, *rest)

    ray_workers._run_tiles = looking
    closing = row_store.RowStore.__exit__

    def counting(self, *rest):
        moved.append(self.moved_bytes)
        return closing(self, *rest)

    row_store.RowStore.__exit__ = counting
    u, i, v = data(options.ratings)
    grid = np.random.default_rng(2).normal(size=(600, 600))
    rate, decay = np.float32(0.005), np.float32(0.02)
    cases = {
        "matrix factorisation": (sgd.function, lambda: (u, i, v, *start(), rate, decay), {}),
        "Gauss-Seidel": (gauss_seidel, lambda: (grid.copy(),), {"ordered": True}),
        "squared error": (squared_error.function, lambda: (u, i, v, *start()), {}),
    }
    workers = options.hosts
    for name, (function, arguments, how) in cases.items():
        answers = []
        for backend in ("in-turn", "ray"):
            given = arguments()
            run = hocket.parallel_for(workers=workers, backend=backend, **how)(function)
            began_s = time.monotonic()
            value = run(*given)
            took_s = time.monotonic() - began_s
            answers.append((value, [a.tobytes() for a in given if isinstance(a, np.ndarray)]))
        same = answers[0] == answers[1]
        print(json.dumps({
            "loop": name, "schedule": run.explain().loops[0].schedule, "same bits": same,
            "workers": len(places), "machines": len(set(places)), "seconds": round(took_s, 2),
            "moved": moved[-1],
        }), flush=True)  # fmt: skip
        if not same:
            sys.exit(1)
    if options.kill:
        _killed(sgd, u, i, v, rate, decay, options)


def _killed(sgd, u, i, v, rate, decay, options: argparse.Namespace) -> None:
    """Passes while the parent kills a machine: it is told by a file when one is under way."""
    from matrix_factorisation import start

    import hocket

    found = []
    for backend in ("in-turn", "ray"):
        W, H = start()
        run = hocket.parallel_for(workers=options.hosts, backend=backend)(sgd.function)
        for number in range(options.passes):
            if number == 1 and backend == "ray":
                print("now", flush=True)
            run(u, i, v, W, H, rate, decay)
        found.append(W.tobytes() + H.tobytes())
    print(json.dumps({"killed": "a machine", "passes": options.passes,
                      "same bits": found[0] == found[1]}), flush=True)  # fmt: skip


def drive(options: argparse.Namespace) -> None:
    """Start the hosts and their Ray nodes, then the caller."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    from testbed import Shape, Testbed

    ray = str(Path(sys.executable).with_name("ray"))
    shape = Shape(options.mbit * 1e6 / 8, burst_bytes=100_000)
    names = [f"host{number}" for number in range(options.hosts)]
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "disabled",
        "RAY_enable_open_telemetry": "0",
    }
    with (
        Testbed(dict.fromkeys(names, shape)) as bed,
        tempfile.TemporaryDirectory(dir="/tmp", prefix="hr") as folder,
    ):
        nodes = []
        head = f"{bed.address(names[0])}:{_PORT}"
        # Workers of a machine that dies must find room on the others.
        cpus = 2 if options.kill else 1
        for number, name in enumerate(names):
            where = ["--head", f"--port={_PORT}", "--include-dashboard=false",
                     f"--temp-dir={folder}"] if not number else [f"--address={head}"]  # fmt: skip
            nodes.append(bed.start(
                name,
                [ray, "start", *where, f"--node-ip-address={bed.address(name)}",
                 f"--num-cpus={cpus}", "--object-store-memory=100000000", "--block"],
                env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            ))  # fmt: skip
            # Nodes that share a folder of sockets must not start at once.
            time.sleep(8)
        caller = bed.start(
            names[0],
            [sys.executable, __file__, *sys.argv[1:], "--address", head],
            env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        for line in caller.stdout:
            if line.strip() == "now":
                time.sleep(0.5)
                os.killpg(nodes[-1].pid, 9)
                print(f"{names[-1]} killed", flush=True)
            else:
                print(line, end="", flush=True)
        if caller.wait():
            sys.exit(f"the caller ended with {caller.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--ratings", type=int, default=200_000)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--address", default="")
    options = parser.parse_args()
    follow(options) if options.address else drive(options)


if __name__ == "__main__":
    main()
