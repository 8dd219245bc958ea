"""CIFAR-10 (JPEG scans): a net trained, split by class, beside ordinary pruning at equal work.

    CIFAR_SCANS=FOLDER python benchmarks/classes/cifar_gpu.py --net vgg19 --seed 0 --out FOLDER

Needs the extra ``classes``, Pillow, and a GPU unless ``--device cpu``. Trains the net, asks
``hocket split`` for parts that are ``--ratio`` times as fast as the whole net in the same runtime,
and trains one 10-way net that was cut to the work of the largest part with as many steps as all
parts together had. One line of JSON with all numbers goes to ``FOLDER/NET-SEED.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import cifar
import numpy as np
import torch

from hocket.classes.combine import accuracy
from hocket.classes.cut import build_part
from hocket.classes.fit import cut_to, whole_times
from hocket.classes.material import prepared
from hocket.classes.settings import NetTraining, SplitRequest
from hocket.classes.split import split
from hocket.classes.steps import Steps
from hocket.classes.training import outputs_of, train_part

HERE = Path(__file__).parent
START_S = time.time()


def tell(what: str, done: int, total: int) -> None:
    if done == total or done % 500 == 0:
        print(f"{time.time() - START_S:6.0f} s  {what} {done}/{total}", flush=True)


def main() -> None:
    """Train, split, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=("vgg19", "resnet56", "vit"), default="vgg19")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", type=int, default=5)
    parser.add_argument("--ratio", type=float, default=4.4)
    parser.add_argument("--eager-ratio", type=float, default=18.5)
    parser.add_argument("--train", type=int, default=2800)
    parser.add_argument("--retrain", type=int, default=2000)
    parser.add_argument("--control", type=int, default=0, help="steps; default: those of all parts")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--decay", type=float, default=5e-4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    without_onnx_package()
    work = asked.out / f"{asked.net}-{asked.seed}"
    steps = Steps(work / "work")
    spec = str(HERE / "cifar.py")
    retraining = NetTraining(
        steps=asked.retrain, batch=asked.batch, learning_rate=asked.rate, seed=asked.seed,
        weight_decay=asked.decay,
    )  # fmt: skip
    request = SplitRequest(
        net=f"{spec}:{asked.net}", data=f"{spec}:images", parts=asked.parts, accuracy_loss=0.2,
        train_steps=asked.train, retraining=retraining, rounds=asked.rounds, seed=asked.seed,
        device=asked.device,
    )  # fmt: skip
    material = prepared(request, steps, tell)
    whole = whole_times(material)
    target_s = min(whole.latency_s / asked.ratio, whole.eager_s / asked.eager_ratio)
    print(f"whole {whole.latency_s * 1e3:.2f} ms, eager {whole.eager_s * 1e3:.2f} ms, "
          f"target of a part {target_s * 1e3:.2f} ms", flush=True)  # fmt: skip
    overhead_s = 60e-6 + 15e-6 * asked.parts
    request = replace(request, target_s=target_s + overhead_s)
    done = split(request, work, jobs=asked.jobs, cores=asked.parts + 1, tell=tell)
    told = done.validation.to_data()
    told["seconds"] = time.time() - START_S
    _write(asked, told, done.table.to_data())
    print(
        json.dumps({key: told[key] for key in ("stages", "test_whole", "test_parts", "slowest_s")})
    )
    largest = max(part.macs for part in done.table.parts)
    control_steps = asked.control or asked.parts * asked.retrain
    told["control"] = control(material, largest, replace(retraining, steps=control_steps))
    told["seconds"] = time.time() - START_S
    _write(asked, told, done.table.to_data())
    print(json.dumps(told["control"]))


def control(material, budget_macs: float, recipe: NetTraining) -> dict[str, float]:
    """One net with all classes, cut to the same work by the same criterion, and trained."""
    everything = tuple(range(material.splits.num_classes))
    cut = cut_to(material, everything, budget_macs)
    net = build_part(material.net, material.structure, material.example, cut)
    net = net.to(material.request.device)
    train_part(net, everything, material.net, material.splits.train, recipe,
               material.splits.augment, lambda *far: tell("control", *far))  # fmt: skip
    test = material.splits.test
    scores = outputs_of(net, test.inputs).numpy()[:, 1:]
    return {"steps": recipe.steps, "test": accuracy(scores, test.labels.cpu().numpy()),
            "share_of_work": budget_macs / material.whole_macs}  # fmt: skip


def _write(asked: argparse.Namespace, told: dict, table: dict) -> None:
    table.pop("hashes", None)
    arguments = {name: str(value) for name, value in vars(asked).items()}
    whole = {"arguments": arguments, "validation": told, "table": table}
    (asked.out / f"{asked.net}-{asked.seed}.json").write_text(json.dumps(whole))


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


if __name__ == "__main__":
    if not (cifar.cache() / "test.npz").is_file():
        for name in ("train", "test"):
            cifar.decode(name)
    os.environ.setdefault("CIFAR_CACHE", str(cifar.cache()))
    np.random.seed(0)
    torch.manual_seed(0)
    main()
