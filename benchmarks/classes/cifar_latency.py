"""Times of the nets and parts that `cifar_gpu.py` has left, on a machine that does nothing else.

    python benchmarks/classes/cifar_latency.py FOLDER/vgg19-0 ... [--json FILE]
    python benchmarks/classes/cifar_latency.py --apart vgg19 part.onnx --core 3

One image, one thread: the whole net in eager torch and in ONNX Runtime and each part in ONNX
Runtime, all in turn, so that what slows the processor down slows all of them; and, for the first
seed, an answer of all parts over processes (median of 300, wall time). ``--apart`` times one part
beside an untrained net, on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cifar
import numpy as np
import torch
from safetensors import safe_open

from hocket.classes.artefact import Folder, read_folder
from hocket.classes.exported import as_onnx
from hocket.classes.serving.dry_run import forecast_of
from hocket.classes.serving.front_end import FrontEnd, ServeOptions
from hocket.classes.session import infer, open_session


def in_turn_s(works: Sequence[Callable[[], object]], rounds: int = 5, runs: int = 8) -> list[float]:
    """Processor time of each work, the lowest tenth of runs that took turns."""
    spent: list[list[int]] = [[] for _ in works]
    for number in range(rounds + 1):
        for work, mine in zip(works, spent, strict=True):
            for run in range(runs + 2):
                start = time.process_time_ns()
                work()
                # The first of each turn finds the caches full of another net.
                if number and run >= 2:
                    mine.append(time.process_time_ns() - start)
    return [float(np.quantile(mine, 0.1)) * 1e-9 for mine in spent]


def whole_works(net: torch.nn.Module, image: torch.Tensor) -> list[Callable[[], object]]:
    """The whole net in eager torch and in ONNX Runtime."""
    torch.set_num_threads(1)
    session = open_session(as_onnx(net, image))
    net.cpu().eval()

    def eager() -> None:
        with torch.no_grad():
            net(image)

    return [eager, lambda: infer(session, image.numpy())]


def saved_net(path: Path) -> torch.nn.Module:
    """The whole net that was trained."""
    net: torch.nn.Module = getattr(cifar, path.name.partition("-")[0])()
    weights = path / "work/whole.safetensors"
    if weights.is_file():
        with safe_open(weights, framework="pt") as file:
            net.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return net


def timed(path: Path, runs: int) -> dict[str, Any]:
    """One folder."""
    folder = read_folder(path)
    generator = np.random.default_rng(0)
    image = generator.normal(size=(1, *folder.table.input_shape)).astype(np.float32)
    works = whole_works(saved_net(path), torch.from_numpy(image))
    parts = [partial(infer, open_session(model), image) for model in folder.models]
    eager_s, whole_s, *part_s = in_turn_s([*works, *parts])
    told = {
        "net": path.name, "eager_s": eager_s, "whole_s": whole_s, "part_s": part_s,
        "over_whole": whole_s / max(part_s), "over_eager": eager_s / max(part_s),
    }  # fmt: skip
    return told | served(folder, image, runs) if path.name.endswith("-0") else told


def apart(net: str, model: str) -> dict[str, float]:
    """A part beside its whole net."""
    image = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    works = whole_works(getattr(cifar, net)().eval(), image)
    times = in_turn_s([*works, partial(infer, open_session(Path(model)), image.numpy())])
    return dict(zip(("eager_s", "whole_s", "part_s"), times, strict=True))


def served(folder: Folder, image: np.ndarray, runs: int) -> dict[str, Any]:
    """Answers over processes."""
    answers = {}
    for spin_s in (0.0, 0.02):
        with FrontEnd(folder, ServeOptions(spin_s=spin_s)) as front_end:
            predicted_s = forecast_of(front_end).answer_s
            took = [front_end.predict(image[0]).took_s for _ in range(runs + 20)][20:]
            inside = [each.compute.p50_s for each in front_end.metrics().workers]
        answers[str(spin_s)] = {
            "predicted_s": predicted_s,
            "p50_s": float(np.median(took)),
            "p99_s": float(np.quantile(took, 0.99)),
            "slowest_in_worker_s": max(each or 0.0 for each in inside),
        }
    return {"answer_by_spin_s": answers}


def without_onnx_package() -> None:
    """The exporter asks for a package that it needs for custom functions alone."""
    try:
        import onnx  # noqa: F401
    except ImportError:
        for name in ("torchscript_exporter", ""):
            try:
                place = f"torch.onnx._internal.{name}.onnx_proto_utils".replace("..", ".")
                module = __import__(place, fromlist=["x"])
                module._add_onnxscript_fn = lambda model, opsets: model
            except ImportError:
                continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--apart", nargs=2, metavar=("NET", "MODEL"))
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--few", action="store_true", help="to try the script")
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    without_onnx_package()
    if asked.apart is not None:
        os.sched_setaffinity(0, [asked.core])
        print(json.dumps(apart(*asked.apart)))
        return
    found = []
    for path in asked.folders:
        found.append(timed(path, 5 if asked.few else 300))
        print(json.dumps(found[-1]), flush=True)
        if asked.json is not None:
            asked.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
