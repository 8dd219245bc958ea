"""Times of the nets and parts that `cifar_gpu.py` has left, on a machine that does nothing else.

    python benchmarks/classes/cifar_latency.py FOLDER/vgg19-0 ... [--json FILE]

One image, one thread: the whole net in eager torch (trained and untrained, and with numbers too
small for the processor's fast path, "denormal" ones, taken for zero) and in ONNX Runtime, each part
in ONNX Runtime, and, for the first seed, an answer of all parts over processes (median of 300, wall
time).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import cifar
import numpy as np
import torch
from safetensors import safe_open

from hocket.classes.artefact import Folder, read_folder
from hocket.classes.fit import eager_latency_s
from hocket.classes.rehearsal import rehearsed
from hocket.classes.serving.front_end import FrontEnd, ServeOptions
from hocket.classes.session import latency_s, open_session

SMALLEST = float(np.finfo(np.float32).tiny)


def eager(path: Path, image: torch.Tensor) -> dict[str, Any]:
    """The whole net in eager torch."""
    net = getattr(cifar, path.name.partition("-")[0])()
    told: dict[str, Any] = {"untrained_s": eager_latency_s(net, image)}
    weights = path / "work/whole.safetensors"
    if not weights.is_file():
        return told
    with safe_open(weights, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    net.load_state_dict(state)
    numbers = [each.abs() for each in state.values() if each.is_floating_point()]
    told["denormal_weights"] = sum(int(((x > 0) & (x < SMALLEST)).sum()) for x in numbers)
    told["trained_s"] = eager_latency_s(net, image)
    torch.set_flush_denormal(True)
    told["trained_flushed_s"] = eager_latency_s(net, image)
    torch.set_flush_denormal(False)
    return told


def timed(path: Path, runs: int) -> dict[str, Any]:
    """One folder."""
    folder = read_folder(path)
    generator = np.random.default_rng(0)
    image = generator.normal(size=(1, *folder.table.input_shape)).astype(np.float32)
    whole_s = latency_s(open_session(path / "whole.onnx"), image)
    eager_s = eager(path, torch.from_numpy(image))
    part_s = [latency_s(open_session(model), image) for model in folder.models]
    slowest_s = max(part_s)
    told = {
        "net": path.name, "whole_s": whole_s, "eager": eager_s, "part_s": part_s,
        "over_whole": whole_s / slowest_s,
        "over_eager": {name: value / slowest_s for name, value in eager_s.items()
                       if name.endswith("_s")},
    }  # fmt: skip
    return told | served(folder, image, runs) if path.name.endswith("-0") else told


def served(folder: Folder, image: np.ndarray, runs: int) -> dict[str, Any]:
    """Answers over processes."""
    answers = {}
    for spin_s in (0.0, 0.02):
        with FrontEnd(folder, ServeOptions(spin_s=spin_s)) as front_end:
            took = [front_end.predict(image[0]).took_s for _ in range(runs + 20)][20:]
            inside = [each.compute.p50_s for each in front_end.metrics().workers]
        answers[str(spin_s)] = {
            "p50_s": float(np.median(took)),
            "p99_s": float(np.quantile(took, 0.99)),
            "slowest_in_worker_s": max(each or 0.0 for each in inside),
        }
    return {"answer_by_spin_s": answers, "predicted_s": rehearsed(folder).answer_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--few", action="store_true", help="to try the script")
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    found = []
    for path in asked.folders:
        found.append(timed(path, 5 if asked.few else 300))
        print(json.dumps(found[-1]), flush=True)
        if asked.json is not None:
            asked.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
