"""CIFAR-10 (JPEG scans): nets trained, split by class, beside ordinary pruning at equal work.

    CIFAR_SCANS=FOLDER python benchmarks/classes/cifar_gpu.py --net vgg19 --seeds 0 1 2 --out FOLDER

Needs the extra ``classes``, Pillow, and a GPU unless ``--device cpu``. For each seed the net is
trained; the share of work with which a part is ``--ratio`` times as fast as the net in the same
runtime and ``--eager-ratio`` times as fast as in eager torch is found by timing all three in turn
(or given by ``--work``); the classes are divided among ``--parts`` by a code of ``--redundancy``,
parts are cut, retrained side by side and calibrated. Seeds share the time until ``--until``.
Controls (``--only-controls``, after the split): one 10-way net cut to the work of the largest part,
with as many steps as all parts together, and as many 10-way nets as there are parts, with the steps
of one part each, their scores averaged. ``FOLDER/NET-SEED.*.json`` has all numbers and
``NET-SEED.outputs.npz`` what every part said to validation and test images.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cifar_latency import in_turn_s, whole_works, without_onnx_package

from hocket.classes.artefact import write_folder
from hocket.classes.calibrate import calibrated
from hocket.classes.codes import cyclic_code
from hocket.classes.combine import Combiner, OddsCalibration, accuracy
from hocket.classes.cut import build_part
from hocket.classes.exported import as_onnx
from hocket.classes.fit import WholeTimes, cut_to
from hocket.classes.grouping import chosen_groups
from hocket.classes.material import Material, prepared
from hocket.classes.session import infer, open_session
from hocket.classes.settings import NetTraining, SplitRequest
from hocket.classes.steps import Steps
from hocket.classes.structure import multiplications
from hocket.classes.table import PartTable, ServedPart, Whole
from hocket.classes.training import outputs_of, train_parts
from hocket.classes.validation import lost_workers, paired_error

HERE = Path(__file__).parent
START_S = time.time()
WRITING_S = 8.0
MARGIN = 0.92
"""Of the latency that is asked for: the parts of other groups and seeds differ a little."""
FIT_TRIES = 6


def tell(what: str, done: int, total: int) -> None:
    if done == total or done % 500 == 0 or done == 20:
        say(f"{what} {done}/{total}")


def say(what: str) -> None:
    print(f"{time.time() - START_S:6.0f} s  {what}", flush=True)


def main() -> None:
    """One net, all its seeds: first all nets, then all parts."""
    asked = arguments()
    without_onnx_package()
    # Of each convolution of each part: more would take longer than it saves.
    torch.backends.cudnn.benchmark_limit = 3
    if asked.net != "vit":
        # Steps that are not recorded take several times as long: not worth a GPU.
        warnings.filterwarnings("error", message="steps cannot be recorded")
    if asked.only_controls:
        for seed in asked.seeds:
            told: dict[str, Any] = {"net": asked.net, "seed": seed}
            material = trained(asked, seed, told)
            told |= json.loads(path_of(asked, seed).with_suffix(".split.json").read_text())
            controls(asked, material, told)
        return
    share, prepared_nets = asked.work, []
    for seed in asked.seeds:
        told = {"net": asked.net, "seed": seed}
        material = trained(asked, seed, told)
        if not share:
            share = fitted_share(asked, material, told)
        write(asked, told)
        prepared_nets.append((material, told))
    for place, (material, told) in enumerate(prepared_nets):
        limit_s = (asked.until - time.time()) / (len(prepared_nets) - place)
        parts = split(asked, material, share, limit_s, told)
        write(asked, told, ".split.json")
        save_folder(asked, material, parts, told)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=("vgg19", "resnet56", "vit"), default="vgg19")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--parts", type=int, default=10)
    parser.add_argument("--redundancy", type=int, default=3)
    parser.add_argument("--work", type=float, default=0.0, help="0 to fit the latency")
    parser.add_argument("--ratio", type=float, default=4.0)
    parser.add_argument("--eager-ratio", type=float, default=18.0)
    parser.add_argument("--train", type=int, default=4000)
    parser.add_argument("--train-limit", type=float, default=1e9)
    parser.add_argument("--train-rate", type=float, default=0.1)
    parser.add_argument("--retrain", type=int, default=5000)
    parser.add_argument("--retrain-limit", type=float, default=1e9)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--only-controls", action="store_true", help="of seeds that were split")
    parser.add_argument("--control-limit", type=float, default=1e9)
    parser.add_argument("--until", type=float, default=1e12, help="seconds since 1970")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--decay", type=float, default=5e-4)
    parser.add_argument("--soft", type=float, default=0.85)
    parser.add_argument("--temperature", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def recipe_of(asked: argparse.Namespace, seed: int) -> NetTraining:
    return NetTraining(
        steps=asked.retrain, limit_s=asked.retrain_limit, batch=asked.batch, seed=seed,
        learning_rate=asked.rate, weight_decay=asked.decay, optimizer=asked.optimizer,
        soft_weight=asked.soft, temperature=asked.temperature,
    )  # fmt: skip


def trained(asked: argparse.Namespace, seed: int, told: dict[str, Any]) -> Material:
    """The whole net, trained, and what its channels are worth."""
    spec, start_s = str(HERE / "cifar.py"), time.time()
    parts = recipe_of(asked, seed)
    first = replace(parts, limit_s=asked.train_limit, learning_rate=asked.train_rate)
    request = SplitRequest(
        net=f"{spec}:{asked.net}", data=f"{spec}:images", parts=asked.parts, accuracy_loss=0.2,
        redundancy=asked.redundancy, train_steps=asked.train, retraining=first, seed=seed,
        device=asked.device,
    )  # fmt: skip
    material = prepared(request, Steps(path_of(asked, seed) / "work"), tell)
    material = replace(material, request=replace(request, retraining=parts))
    told["whole"] = {
        name: accuracy(outputs_of(material.net, data.inputs).numpy(), data.labels.cpu().numpy())
        for name, data in splits_of(material)
    }
    told["whole"] |= {
        "macs": material.whole_macs,
        "parameters": sum(each.numel() for each in material.net.parameters()),
        "seconds": time.time() - start_s,
    }
    say(f"whole {told['whole']}")
    return material


def splits_of(material: Material) -> list[tuple[str, Any]]:
    return [("validation", material.splits.validation), ("test", material.splits.test)]


def fitted_share(asked: argparse.Namespace, material: Material, told: dict[str, Any]) -> float:
    """The share of work with which a part is as fast as asked, by times that were taken in turn."""
    classes = parts_of(asked, material)[2][0]
    image = material.example.numpy()
    works = whole_works(copy.deepcopy(material.net).cpu(), material.example)
    share, best, tries = 0.6 / asked.ratio, 0.0, []
    for _ in range(FIT_TRIES):
        cut = cut_to(material, classes, share * material.whole_macs)
        part = build_part(material.net, material.structure, material.example, cut)
        session = open_session(as_onnx(part, material.example))
        eager_s, whole_s, part_s = in_turn_s([*works, partial(infer, session, image)])
        used = max(asked.ratio * part_s / whole_s, asked.eager_ratio * part_s / eager_s)
        tries.append({"share": share, "eager_s": eager_s, "whole_s": whole_s, "part_s": part_s})
        say(f"fit {tries[-1]}: {used:.2f} of the time that it may take")
        if used <= MARGIN:
            best = max(best, share)
            if used >= 0.92 * MARGIN:
                break
        share = min(share * 0.97 * MARGIN / used, 1.0)
    told["fit"] = {"tries": tries, "share": best or share}
    return best or share


def parts_of(asked: argparse.Namespace, material: Material) -> tuple[Any, Any, Any]:
    """Groups, what each part holds, its classes."""
    groups = chosen_groups(material, WholeTimes(0.0, 0.0), 16)
    held = cyclic_code(len(groups), asked.redundancy)
    classes = [tuple(sorted(each for g in mine for each in groups[g])) for mine in held]
    return groups, held, classes


def split(
    asked: argparse.Namespace,
    material: Material,
    share: float,
    limit_s: float,
    told: dict[str, Any],
) -> list[torch.nn.Module]:
    """Cut, retrain, calibrate, and try on test data."""
    start_s = time.time()
    groups, held, classes = parts_of(asked, material)
    cuts = [cut_to(material, mine, share * material.whole_macs) for mine in classes]
    parts = [built(material, cut) for cut in cuts]
    built_s = time.time() - start_s
    limit_s = max(min(asked.retrain_limit, limit_s - built_s - WRITING_S), 1.0)
    steps = retrained(material, parts, classes, "retrain parts", limit_s=limit_s)
    trained_s = time.time() - start_s - built_s
    outputs = {name: said_by(parts, data) for name, data in splits_of(material)}
    combiner = combined(material, classes, outputs["validation"])
    whole = outputs_of(material.net, material.splits.test.inputs).numpy()
    labels = {name: data.labels.cpu().numpy() for name, data in splits_of(material)}
    scores = {name: combiner.scores(each) for name, each in outputs.items()}
    lost = lost_workers(combiner, outputs["test"], labels["test"], asked.redundancy)
    told["parts"] = {
        **{name: accuracy(scores[name], labels[name]) for name in scores},
        "lost_points": 100 * (told["whole"]["test"] - accuracy(scores["test"], labels["test"])),
        "paired_error_points": 100 * paired_error(whole, scores["test"], labels["test"]),
        "lost_workers": [vars(each) for each in lost],
        "steps": steps, "built_s": built_s, "trained_s": trained_s,
        "seconds": time.time() - start_s,
        "groups": groups, "held": held, "classes": classes,
        "work": [sum(multiplications(each, material.example).values()) / material.whole_macs
                 for each in parts],
        "parameters": [sum(each.numel() for each in part.parameters()) for part in parts],
        "omitted": [len(cut.omitted) for cut in cuts],
        "calibrations": [vars(each) for each in combiner.calibrations],
    }  # fmt: skip
    keep_outputs(asked, material, outputs, told["seed"])
    left_out = ("calibrations", "classes", "held", "lost_workers")
    seen = {key: value for key, value in told["parts"].items() if key not in left_out}
    say(f"parts {json.dumps(seen)}")
    return parts


def keep_outputs(
    asked: argparse.Namespace, material: Material, outputs: dict[str, list[np.ndarray]], seed: int
) -> None:
    """What the net and its parts said, to try other ways to combine it."""
    arrays = {f"{name}_{index}": each.astype(np.float16)
              for name, found in outputs.items() for index, each in enumerate(found)}  # fmt: skip
    for name, data in splits_of(material):
        arrays[f"{name}_whole"] = outputs_of(material.net, data.inputs).numpy().astype(np.float16)
        arrays[f"{name}_labels"] = data.labels.cpu().numpy().astype(np.uint8)
    np.savez_compressed(path_of(asked, seed).with_suffix(".outputs.npz"), **arrays)


def built(material: Material, cut: Any) -> torch.nn.Module:
    part = build_part(material.net, material.structure, material.example, cut)
    return part.to(material.request.device)


def retrained(
    material: Material, parts: list[torch.nn.Module], classes: Any, what: str, **changed: Any
) -> int:
    recipe = replace(material.request.retraining, **changed)
    return train_parts(parts, classes, material.net, material.splits.train, recipe,
                       material.splits.augment, lambda *far: tell(what, *far))  # fmt: skip


def said_by(parts: list[torch.nn.Module], data: Any) -> list[np.ndarray]:
    found = [outputs_of(part, data.inputs).numpy().astype(float) for part in parts]
    for part in parts:
        part.cpu()
    return found


def combined(material: Material, classes: Any, outputs: list[np.ndarray]) -> Combiner:
    plain = Combiner(material.splits.num_classes, tuple(classes),
                     tuple(OddsCalibration() for _ in classes))  # fmt: skip
    return calibrated(plain, outputs, material.splits.validation.labels.cpu().numpy())


def controls(asked: argparse.Namespace, material: Material, told: dict[str, Any]) -> None:
    """Ordinary pruning at equal work: one net with all the steps, and many averaged."""
    everything = tuple(range(material.splits.num_classes))
    cut = cut_to(material, everything, max(told["parts"]["work"]) * material.whole_macs)
    steps, test = told["parts"]["steps"], material.splits.test
    labels = test.labels.cpu().numpy()
    kinds = (("one", 1, asked.parts * steps), ("averaged", asked.parts, steps))
    for name, count, each_steps in kinds:
        if time.time() + 20 > asked.until:
            say(f"no time for the control {name}")
            return
        nets = [built(material, cut) for _ in range(count)]
        for number, net in enumerate(nets[1:]):
            # Each another net: the head is drawn anew, which is all that chance can differ in.
            torch.manual_seed(number)
            torch.nn.init.normal_(net.get_submodule(material.structure.head).weight, std=0.05)
        limit_s = min(asked.control_limit, left_s(asked))
        made = retrained(material, nets, [everything] * count, f"control {name}",
                         steps=each_steps, limit_s=limit_s)  # fmt: skip
        scores = np.mean([each[:, 1:] for each in said_by(nets, test)], axis=0)
        told[f"control_{name}"] = {"test": accuracy(scores, labels), "nets": count,
                                   "steps_each": made, "asked_steps_each": each_steps}  # fmt: skip
        say(f"control {name} {told[f'control_{name}']}")
        write(asked, told, ".controls.json")


def left_s(asked: argparse.Namespace) -> float:
    """For a training that begins now; its results must be written too."""
    return max(asked.until - time.time() - WRITING_S, 1.0)


def path_of(asked: argparse.Namespace, seed: int) -> Path:
    return asked.out / f"{asked.net}-{seed}"


def write(asked: argparse.Namespace, told: dict[str, Any], suffix: str = ".whole.json") -> None:
    given = {name: str(value) for name, value in vars(asked).items()}
    path = path_of(asked, told["seed"]).with_suffix(suffix)
    path.write_text(json.dumps({"arguments": given, **told}, default=float))


def save_folder(
    asked: argparse.Namespace,
    material: Material,
    parts: list[torch.nn.Module],
    told: dict[str, Any],
) -> None:
    """A folder that `cifar_latency.py` times and serves; without torch.export files."""
    found, files = told["parts"], {"whole.onnx": as_onnx(material.net, material.example)}
    rows = []
    for index, part in enumerate(parts):
        files[f"part-{index}.onnx"] = as_onnx(part, material.example)
        files[f"part-{index}.pt2"] = b"-"
        calibration = OddsCalibration(**found["calibrations"][index])
        rows.append(ServedPart(found["classes"][index], calibration, f"part-{index}.onnx",
                               f"part-{index}.pt2", found["work"][index] * material.whole_macs,
                               found["parameters"][index], 0.0))  # fmt: skip
    whole = Whole("whole.onnx", material.whole_macs, told["whole"]["parameters"], 0.0, 0.0)
    table = PartTable(material.splits.names, tuple(material.example.shape[1:]), "float32",
                      found["groups"], found["held"], tuple(rows), whole,
                      asked.redundancy)  # fmt: skip
    write_folder(path_of(asked, told["seed"]), table, files, {})
    material.net.to(asked.device)


if __name__ == "__main__":
    main()
