"""sensAI's headline by the time of an answer, with its control and its model-parallel baseline.

Run: python benchmarks/systems/sensai.py [--device cuda] [--train 600] [--retrain 200] [--scale 4]
     python benchmarks/systems/sensai.py --quick

100 classes, as many as CIFAR-100 has: the ten digits in ten colours. One VGG-like net becomes ten
sub-models with 0.05 of its work each. Beside them:

- controls: one net pruned to the work of a sub-model, and to the work of all of them, each trained
  with as many steps as all sub-models together;
- model parallelism: the layers of the whole net in as many stages, one process each.

An answer is timed over processes (median of 300), single nets in ONNX Runtime on one thread. The
row of docs/systems.md needs a core for each of the ten workers; with fewer the table says so.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hocket.classes.artefact import read_folder
from hocket.classes.exported import as_onnx
from hocket.classes.serving.front_end import FrontEnd, ServeOptions
from hocket.classes.session import infer, open_session
from hocket.classes.settings import NetTraining, SplitRequest
from hocket.classes.sources import load_net
from hocket.classes.split import split

COLOURS = np.random.default_rng(3).permutation(
    [[red, green, blue] for red in (0, 0.5, 1) for green in (0, 0.5, 1) for blue in (0, 1)]
)[:10]
SUB_MODELS, WORK = 10, 0.05


def images() -> dict[str, Any]:
    """Digits in ten colours; a fifth of the digits is held back for decisions and for the test."""
    try:
        from sklearn.datasets import load_digits

        pixels, digits = load_digits(return_X_y=True)
        pixels = pixels.reshape(-1, 8, 8) / 16
    except ImportError:
        import runpy

        example = Path(__file__).parents[2] / "examples" / "classes_digits.py"
        pixels, digits = runpy.run_path(str(example))["images"]()
        pixels = np.asarray(pixels).reshape(-1, 8, 8)
    order = np.random.default_rng(0).permutation(len(digits))
    ends = len(order) * 7 // 10, len(order) * 85 // 100

    def coloured(chosen: Any) -> tuple[Any, Any]:
        tinted = pixels[chosen, None, None] * COLOURS[None, :, :, None, None]
        labels = np.asarray(digits)[chosen, None] * 10 + np.arange(10)
        mixed = np.random.default_rng(1).permutation(labels.size)
        return tinted.reshape(-1, 3, 8, 8).astype(np.float32)[mixed], labels.ravel()[mixed]

    names = [f"{digit} in colour {colour}" for digit in range(10) for colour in range(10)]
    parts = np.split(order, ends)
    return dict(zip(("train", "validation", "test"), map(coloured, parts), strict=True)) | {
        "names": names
    }


def net() -> nn.Module:
    """Four convolutions over images of 8 x 8, enlarged SENSAI_SCALE times (4: 32 x 32)."""
    scale = int(os.environ.get("SENSAI_SCALE", "4"))
    layers: list[nn.Module] = [nn.Upsample(scale_factor=scale)] if scale > 1 else []
    widths = (3, 64, 128, 256, 256)
    for number, (before, after) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (number % 2)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(),
                         nn.Linear(256 * 4, 100))  # fmt: skip


def median_s(work: Callable[[], object], runs: int = 300) -> float:
    """Median wall time after a warm-up."""
    spent = []
    for number in range(runs + 20):
        start = time.perf_counter()
        work()
        if number >= 20:
            spent.append(time.perf_counter() - start)
    return float(np.median(spent))


def _stage(model: bytes, end: Connection) -> None:
    session = open_session(model)
    while (given := end.recv()) is not None:
        end.send(infer(session, given))


def model_parallel_s(whole: nn.Module, example: torch.Tensor, num_stages: int) -> float:
    """An answer when every process holds some layers, in turn (the deck's baseline)."""
    layers = list(whole.children())
    starts = [0, *(k for k, layer in enumerate(layers) if k and isinstance(layer, nn.Conv2d))]
    chosen = [int(k) for k in np.linspace(0, len(starts) - 1, min(num_stages, len(starts)))]
    bounds = [*(starts[k] for k in chosen), len(layers)]
    stages = [nn.Sequential(*layers[a:b]).eval() for a, b in itertools.pairwise(bounds)]
    context, ends, processes = get_context("spawn"), [], []
    value = example
    for stage in stages:
        near, far = context.Pipe()
        processes.append(context.Process(target=_stage, args=(as_onnx(stage, value), far)))
        processes[-1].start()
        ends.append(near)
        with torch.no_grad():
            value = stage(value)

    def answer() -> None:
        passed = example.numpy()
        for end in ends:
            end.send(passed)
            passed = end.recv()

    try:
        return median_s(answer)
    finally:
        for end, process in zip(ends, processes, strict=True):
            end.send(None)
            process.join()


def measured(
    folder: Path, train: int, retrain: int, device: str
) -> list[tuple[str, float, float, float]]:
    """Rows of name, work of the heaviest net, test accuracy and seconds of an answer."""
    here = str(Path(__file__).resolve())

    def split_to(name: str, count: int, work: float, steps: int) -> Any:
        request = SplitRequest(
            net=f"{here}:net", data=f"{here}:images", parts=count, work=work, train_steps=train,
            accuracy_loss=100, rounds=0, retraining=NetTraining(steps=steps), device=device,
        )  # fmt: skip
        return split(request, folder / name, progress=lambda *_: None)

    subs = split_to("sub-models", SUB_MODELS, WORK, retrain)
    rows = [("whole net, eager torch", 1.0, subs.validation.test_whole, subs.table.whole.eager_s)]
    rows.append(
        ("whole net, ONNX Runtime", 1.0, subs.validation.test_whole, subs.table.whole.latency_s)
    )
    whole = load_net(f"{here}:net", 0).eval()
    example = torch.zeros(1, *subs.table.input_shape)
    rows.append(("whole net, model parallel", 1.0, subs.validation.test_whole,
                 model_parallel_s(whole, example, SUB_MODELS)))  # fmt: skip
    with FrontEnd(read_folder(folder / "sub-models"), ServeOptions(deadline_s=60)) as front_end:
        given = example[0].numpy()
        heaviest = max(part.macs for part in subs.table.parts) / subs.table.whole.macs
        answer_s = median_s(lambda: front_end.predict(given))
    rows.append((f"{SUB_MODELS} sub-models", heaviest, subs.validation.test_parts, answer_s))
    for name, work in (("control, work of one", WORK), ("control, work of all", SUB_MODELS * WORK)):
        one = split_to(name, 1, work, SUB_MODELS * retrain)
        (part,) = one.table.parts
        rows.append(
            (name, part.macs / one.table.whole.macs, one.validation.test_parts, part.latency_s)
        )
    return rows


def table(rows: list[tuple[str, float, float, float]]) -> str:
    """Rows with the gain over eager torch and over the same runtime."""
    eager_s, whole_s = rows[0][3], rows[1][3]
    lines = ["| | work of a net | accuracy | ms per answer | over eager torch | same runtime |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for name, work, accuracy, answer_s in rows:
        lines.append(f"| {name} | {work:.3f} | {100 * accuracy:.2f} % | {1e3 * answer_s:.3f} | "
                     f"{eager_s / answer_s:.1f} | {whole_s / answer_s:.1f} |")  # fmt: skip
    return "\n".join(lines)


def ours(rows: list[tuple[str, float, float, float]]) -> str:
    """The figures of the row in docs/systems.md."""
    found = {name: (accuracy, answer_s) for name, _, accuracy, answer_s in rows}
    eager_s, whole_s = rows[0][3], rows[1][3]

    def gains(name: str) -> str:
        accuracy, answer_s = found[name]
        return (f"{eager_s / answer_s:.1f}x over eager PyTorch, {whole_s / answer_s:.1f}x over the "
                f"same runtime at {100 * accuracy:.1f} %")  # fmt: skip

    return (f"an answer of {SUB_MODELS} sub-models {gains(f'{SUB_MODELS} sub-models')}; control, "
            f"one net with the work of one sub-model: {gains('control, work of one')}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--train", type=int, default=600)
    parser.add_argument("--retrain", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", type=int, default=4, help="images of 8 x 8, enlarged so often")
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs")
    options = parser.parse_args()
    # The net is built by the processes of `split`, which inherit the environment.
    os.environ["SENSAI_SCALE"] = "1" if options.quick else str(options.scale)
    train, retrain = (20, 5) if options.quick else (options.train, options.retrain)
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder), train, retrain, options.device)
    print(table(rows))
    cores = len(os.sched_getaffinity(0))
    if cores <= SUB_MODELS:
        print(f"{SUB_MODELS} workers on {cores} cores: their time is no latency")
    print(ours(rows))


if __name__ == "__main__":
    main()
