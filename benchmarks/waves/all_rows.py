"""All workloads of the benchmarks of waves, prepared side by side and measured one at a time.

    PYTHONPATH=src python benchmarks/waves/all_rows.py --seconds 240 --out FOLDER [--lanes 'A;B'] [--compiled 'A;B']

Each workload has a process of its own, so that captures and compilations of one hide behind those
of the others; the GPU goes from hand to hand (`timing.Turns`). Lines are printed and saved as they
come. Pairs of kernels come first.
"""  # noqa: E501

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
LANES = "ResNet-56, CIFAR, 256;GPT-2 small 4 x 512;LSTM;BERT"
SMALL = "ResNet-56, CIFAR, 32;Mixer;GPT-2 small 4 x 64"
COMPILED = "ResNet-56, CIFAR, 32;GPT-2 small 4 x 64;LSTM;Mixer;ResNet-56, CIFAR, 256"


def main() -> int:
    """Start all, and hand on what they print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--lanes", default=LANES, help="workloads of recorded steps, by ;")
    parser.add_argument("--small", default=SMALL, help="the same, whose losses are not compared")
    parser.add_argument("--compiled", default=COMPILED, help="workloads of compiled steps, by ;")
    parser.add_argument("--systems", default="", help="compiled systems, by a part of the name")
    parser.add_argument("--extra", default="", help="options of all")
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    until = time.time() + options.seconds - 12
    tasks = [("pairs.py", "", "")]
    tasks += [("h200.py", name, "") for name in options.lanes.split(";") if name]
    tasks += [("h200.py", name, "--losses=0") for name in options.small.split(";") if name]
    tasks += [
        ("compiled_lanes.py", name, f"--systems={options.systems}")
        for name in options.compiled.split(";")
        if name
    ]
    printing = threading.Lock()
    with tempfile.TemporaryDirectory() as folder, (options.out / "waves.log").open("a") as saved:

        def hand_on(script: str, child: subprocess.Popen[str]) -> None:
            assert child.stdout is not None
            for line in child.stdout:
                with printing:
                    told = f"{time.time() - until + options.seconds - 12:5.0f} {script[:5]} {line}"
                    print(told, end="", flush=True)
                    saved.write(told)
                    saved.flush()

        threads = []
        children = []
        for script, name, more in tasks:
            command = [sys.executable, str(HERE / script), "--lock", f"{folder}/gpu",
                       "--until", str(until), "--only", name]  # fmt: skip
            if name:
                command += [*options.extra.split(), *filter(None, [more])]
            if options.toy:
                command.append("--toy")
            environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "3",
                           "OMP_NUM_THREADS": "2"}  # fmt: skip
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                     text=True, env=environment)  # fmt: skip
            children.append(child)
            threads.append(threading.Thread(target=hand_on, args=(script, child), daemon=True))
            threads[-1].start()
        try:
            for child in children:
                child.wait(max(0.1, until + 12 - time.time()))
        except subprocess.TimeoutExpired:
            print("out of time", flush=True)
        for child in children:
            child.kill()
        for thread in threads:
            thread.join(2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
