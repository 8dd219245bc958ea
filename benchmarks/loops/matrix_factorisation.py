"""SGD matrix factorisation, rank 32: two threads against compiled serial, plain Python and LIBMF.

    python benchmarks/loops/matrix_factorisation.py [--libmf FOLDER] [--repeats 9]

FOLDER holds LIBMF's ``mf-train``, built with AVX. Times are the best of interleaved runs; loads of
other processes lengthen wall times, so CPU times stand beside them.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import hocket

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from loops_mf import sgd, squared_error

USERS, ITEMS, RANK = 6040, 3706, 32


def zipf(rng, size, exponent, count):
    weights = 1 / np.arange(1, size + 1) ** exponent
    return rng.choice(size, count, p=weights / weights.sum()).astype(np.int32)


def data(count, seed=0):
    rng = np.random.default_rng(seed)
    u, i = zipf(rng, USERS, 0.6, count), zipf(rng, ITEMS, 0.8, count)
    W, H = rng.normal(size=(USERS, 8)) * 0.6, rng.normal(size=(ITEMS, 8)) * 0.6
    v = (W[u] * H[i]).sum(axis=1) + rng.normal(size=count) * 0.3
    return u, i, v.astype(np.float32)


def start(seed=1):
    rng = np.random.default_rng(seed)
    scale = np.float32(1 / np.sqrt(RANK))
    return (
        rng.random((USERS, RANK), dtype=np.float32) * scale,
        rng.random((ITEMS, RANK), dtype=np.float32) * scale,
    )


def timed(run):
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def with_workers(function, workers, backend="threads"):
    return hocket.parallel_for(fastmath=True, workers=workers, backend=backend)(function.function)


def rmse(u, i, v, W, H):
    return float(np.sqrt(squared_error(u, i, v, W, H) / len(v)))


def throughput(u, i, v, repeats):
    rate, decay = np.float32(0.005), np.float32(0.02)
    serial, threads = with_workers(sgd, 1), with_workers(sgd, 2)
    W, H = start()
    best = {"serial": [9e9, 9e9], "threads": [9e9, 9e9]}
    for _ in range(repeats + 1):
        for name, run in (("serial", serial), ("threads", threads)):
            found = timed(lambda run=run: run(u, i, v, W, H, rate, decay))
            best[name] = [min(one, other) for one, other in zip(best[name], found, strict=True)]
    few = 4000
    plain, _ = timed(lambda: sgd.function(u[:few], i[:few], v[:few], W, H, rate, decay))
    for name, (wall, cpu) in best.items():
        print(
            f"{name:8} {len(v) / wall / 1e6:6.1f} M ratings/s wall, {len(v) / cpu / 1e6:6.1f} cpu"
        )
    print(f"python   {few / plain / 1e6:6.4f} M ratings/s")
    print(f"threads over serial {best['serial'][0] / best['threads'][0]:.2f}x wall, "
          f"over python {len(v) / best['threads'][0] / (few / plain):.0f}x")  # fmt: skip


def same_loss(u, i, v):
    """RMSE after five epochs: serial in random order, two threads in a rotation."""
    found = []
    for workers in (1, 2):
        W, H = start()
        run = with_workers(sgd, workers)
        for _ in range(5):
            run(u, i, v, W, H, np.float32(0.02), np.float32(0.02))
        found.append(rmse(u, i, v, W, H))
    print(f"RMSE at epoch 5: serial {found[0]:.4f}, threads {found[1]:.4f} "
          f"({100 * (found[1] / found[0] - 1):+.2f} %)")  # fmt: skip


def same_bits(u, i, v, runs):
    few = 50_000
    reference = None
    for number in range(runs):
        W, H = start()
        run = with_workers(sgd, 2, "threads" if number else "in-turn")
        run(u[:few], i[:few], v[:few], W, H, np.float32(0.01), np.float32(0.02))
        bits = W.tobytes() + H.tobytes()
        reference = reference or bits
        assert bits == reference, f"run {number} differs"
    print(f"{runs} runs of 2 threads: all bits equal to the tiles in turn")


def child_cpu_s():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def libmf_losses(folder, file, rate, epochs):
    """RMSE after each epoch of LIBMF on two threads, and the CPU seconds of the whole run."""
    command = [str(folder / "mf-train"), "-k", str(RANK), "-s", "2", "-l2", "0.02", "-r", str(rate)]
    before = child_cpu_s()
    out = subprocess.run(
        [*command, "-t", str(epochs), str(file), str(file) + ".model"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    losses = [float(line.split()[1]) for line in out.strip().splitlines()[1:]]
    return losses, child_cpu_s() - before


def against_libmf(folder, u, i, v):
    """CPU seconds per epoch with two threads each, and to the loss that LIBMF's defaults reach."""
    epochs = 20
    seconds = {1: 9e9, epochs: 9e9}
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "ratings.txt"
        np.savetxt(file, np.column_stack([u, i, v]), fmt=["%d", "%d", "%.5f"])
        for count in (1, epochs) * 3:
            losses, spent = libmf_losses(folder, file, 0.1, count)
            seconds[count] = min(seconds[count], spent)
        target = losses[-1]
        others = [libmf_losses(folder, file, rate, epochs)[0] for rate in (0.2, 0.3)]
    theirs = (seconds[epochs] - seconds[1]) / (epochs - 1)
    fewest = min(
        next((n + 1 for n, loss in enumerate(curve) if loss <= target), epochs) for curve in others
    )
    run, decay = with_workers(sgd, 2), np.float32(0.02)
    W, H = start()
    plain = min(
        timed(lambda: run(u, i, v, W.copy(), H.copy(), np.float32(0.005), decay))[1]
        for _ in range(6)
    )
    print(f"LIBMF, 2 threads: {len(v) / theirs / 1e6:.1f} M ratings per CPU second (adaptive step);"
          f" ours, plain SGD {len(v) / plain / 1e6:.1f}, {theirs / plain:.2f}x")  # fmt: skip
    num_epochs, total = 0, 0.0
    while num_epochs < 60:
        rate = np.float32(0.1 * 0.8**num_epochs)
        num_epochs += 1
        total += timed(lambda rate=rate: run(u, i, v, W, H, rate, decay))[1]
        if rmse(u, i, v, W, H) <= target:
            break
    print(f"to RMSE {target:.4f}: LIBMF {epochs} epochs at its default rate ({theirs * epochs:.2f} "
          f"CPU s), {fewest} at its best of three ({theirs * fewest:.2f}); ours, rate 0.1 falling "
          f"by a fifth per epoch, {num_epochs} epochs, {total:.2f} CPU s: "
          f"{theirs * epochs / total:.2f}x and {theirs * fewest / total:.2f}x shorter")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--libmf", type=Path, default=None)
    parser.add_argument("--ratings", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--bit-runs", type=int, default=200)
    options = parser.parse_args()
    u, i, v = data(options.ratings)
    throughput(u, i, v, options.repeats)
    same_loss(u, i, v)
    same_bits(u, i, v, options.bit_runs)
    if options.libmf:
        against_libmf(options.libmf, u, i, v)


if __name__ == "__main__":
    main()
