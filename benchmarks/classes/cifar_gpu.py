"""CIFAR-10 (JPEG scans): nets trained, split by class, beside ordinary pruning at equal work.

    CIFAR_SCANS=FOLDER python benchmarks/classes/cifar_gpu.py --net vgg19 --seeds 0 1 2 --out FOLDER

Needs the extra ``classes``, Pillow, and a GPU unless ``--device cpu``. The nets of all seeds are
trained side by side (or read from ``--wholes``, where an earlier run has left them); the share of
work with which a part is ``--ratio`` times as fast as the net in the same runtime and
``--eager-ratio`` times as fast as in eager torch is found by processes that time all three in turn
(or given by ``--work``); the classes are divided among ``--parts`` by a code of ``--redundancy``;
the parts of all seeds are cut, retrained side by side and calibrated. With ``--alike`` all parts
have the widths that all classes together want, so that one compiled step serves all of them
(``--compile``). Processes that share a GPU train in turn (``GPU_TURN`` names a file to lock): what
is not training runs beside it.
``--control-steps N`` makes only the control, of the first seed: one 10-way net cut to ``--work``,
with as many steps as all parts of a split had together.
``FOLDER/NET-SEED.*.json`` has all numbers and ``NET-SEED.outputs.npz`` what every part said to
validation and test images.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cifar_latency import without_onnx_package
from cifar_seed import (
    Seed,
    judge,
    load_whole,
    path_of,
    said_by,
    save_folder,
    save_whole,
    say,
    splits_of,
    write,
)

from hocket.classes.codes import cyclic_code, held_classes
from hocket.classes.combine import accuracy
from hocket.classes.cut import PartCut, best_units, build_part
from hocket.classes.exported import as_onnx
from hocket.classes.fit import WholeTimes, cut_to
from hocket.classes.material import Material, described, moved
from hocket.classes.settings import NetTraining, SplitRequest
from hocket.classes.sources import load_data, load_net, state_arrays
from hocket.classes.split import chosen_groups
from hocket.classes.stepping import Lesson
from hocket.classes.steps import Steps
from hocket.classes.structure import multiplications
from hocket.classes.training import learn, outputs_of, parts_lesson, whole_lesson

HERE = Path(__file__).parent
WRITING_S = 18.0
MARGIN = 0.93
"""Of the latency that is asked for: the parts of other groups and seeds differ a little."""
FIT_TRIES = 5
FIT_PROCESSES = 3
"""That time the same part: what one process finds is up to 1.4 times what another does."""


def progress(what: str, done: int, total: int) -> None:
    if done == total or done % 500 == 0 or done == 20:
        say(f"{what} {done}/{total}")


@contextmanager
def turn() -> Iterator[None]:
    """The GPU alone: two processes at once would each have less than half of it."""
    with open(os.environ.get("GPU_TURN", os.devnull), "w") as file:
        if file.name != os.devnull:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> None:
    """One net, all its seeds: first all nets, then all parts, then the control."""
    asked = arguments()
    without_onnx_package()
    # Kernels of each convolution that are tried: more would take longer than it saves.
    torch.backends.cudnn.benchmark_limit = asked.kernels
    if asked.net != "vit":
        # Steps that are not recorded take several times as long: not worth a GPU.
        warnings.filterwarnings("error", message="steps cannot be recorded")
    seeds = trained(asked)
    if asked.control_steps:
        control(asked, seeds[0])
        return
    share = asked.work or fitted_share(asked, seeds[0])
    shape = alike_shape(seeds[0], share) if asked.alike else None
    for seed in seeds:
        cut(asked, seed, share, shape)
        write(asked, seed.told)
    say(f"parts with {share:.3f} of the work are made")
    compile_first(asked, seeds[0])
    with turn():
        start_s = time.time()
        made = retrained(asked, seeds)
        trained_s = time.time() - start_s
        outputs = [
            {name: said_by(seed.parts, data) for name, data in splits_of(seed.material)}
            for seed in seeds
        ]
    for seed, said in zip(seeds, outputs, strict=True):
        seed.told["parts"] = {"steps": made, "trained_s": trained_s}
        judge(asked, seed, said)
        write(asked, seed.told, ".split.json")
        save_folder(asked, seed)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
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
    parser.add_argument("--control-steps", type=int, default=0)
    parser.add_argument("--alike", action="store_true")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--first-share", type=float, default=0.2, help="that the fit tries")
    parser.add_argument("--kernels", type=int, default=3, help="tried for each convolution")
    parser.add_argument("--wholes", type=Path, default=None, help="folder with NET-SEED.npz")
    parser.add_argument("--until", type=float, default=1e12, help="seconds since 1970")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--decay", type=float, default=5e-4)
    parser.add_argument("--soft", type=float, default=0.85)
    parser.add_argument("--temperature", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(given)


def recipe_of(asked: argparse.Namespace, seed: int, **changed: Any) -> NetTraining:
    usual = NetTraining(
        steps=asked.retrain, batch=asked.batch, seed=seed,
        learning_rate=asked.rate, weight_decay=asked.decay, optimizer=asked.optimizer,
        soft_weight=asked.soft, temperature=asked.temperature, compiled=asked.compile,
    )  # fmt: skip
    return replace(usual, **changed)


def trained(asked: argparse.Namespace) -> list[Seed]:
    """The whole nets, trained, and what their channels are worth."""
    spec, start_s = str(HERE / "cifar.py"), time.time()
    device = torch.device(asked.device)
    splits = moved(load_data(f"{spec}:images", 0), device)
    nets = [load_net(f"{spec}:{asked.net}", seed).to(device) for seed in asked.seeds]
    recipes = [
        recipe_of(asked, seed, steps=asked.train, learning_rate=asked.train_rate,
                  limit_s=asked.train_limit, compiled=False)
        for seed in asked.seeds
    ]  # fmt: skip
    known = [load_whole(asked, seed, net) for seed, net in zip(asked.seeds, nets, strict=True)]
    made, is_trained = 0, all(known) or not asked.train
    with nullcontext() if is_trained else turn():
        begun_s = time.time()
        if not is_trained:
            lessons = [
                whole_lesson(net, splits.train, recipe, splits.augment)
                for net, recipe in zip(nets, recipes, strict=True)
            ]
            made = learn(lessons, recipes[0], lambda *far: progress("train the nets", *far))
        trained_s, found = time.time() - begun_s, []
        for seed, net in zip(asked.seeds, nets, strict=True):
            request = SplitRequest(
                net=f"{spec}:{asked.net}", data=f"{spec}:images", parts=asked.parts,
                redundancy=asked.redundancy, seed=seed, device=asked.device,
            )  # fmt: skip
            steps = Steps(path_of(asked, seed) / "work")
            steps.put("whole", "trained here", state_arrays(net))
            material = described(request, net, splits, steps, f"{asked.net} {seed}", progress)
            told: dict[str, Any] = {"net": asked.net, "seed": seed}
            told["whole"] = {
                name: accuracy(outputs_of(net, data.inputs).numpy(), data.labels.cpu().numpy())
                for name, data in splits_of(material)
            }
            told["whole"] |= {
                "macs": material.whole_macs, "steps": made, "trained_s": trained_s,
                "parameters": sum(each.numel() for each in net.parameters()),
                "seconds": time.time() - start_s,
            }  # fmt: skip
            say(f"whole {told['whole']}")
            found.append(Seed(material, told))
    for seed in found:
        save_whole(asked, seed)
    return found


def fitted_share(asked: argparse.Namespace, seed: Seed) -> float:
    """The share of work with which a part is as fast as asked, timed in other processes."""
    material = seed.material
    classes = parts_of(asked, material)[2][0]
    share, best, tries = asked.first_share, 0.0, []
    for _ in range(FIT_TRIES):
        planned = cut_to(material, classes, share * material.whole_macs)
        part = build_part(material.net, material.structure, material.example, planned)
        times = timed_apart(asked.net, as_onnx(part, material.example))
        over_whole, over_eager = (
            float(np.median([each[name] / each["part_s"] for each in times]))
            for name in ("whole_s", "eager_s")
        )
        used = max(asked.ratio / over_whole, asked.eager_ratio / over_eager)
        tries.append({"share": share, "times": times})
        say(f"fit {share:.3f}: {over_whole:.2f}x the runtime, {over_eager:.2f}x eager {times}")
        if used <= MARGIN:
            best = max(best, share)
            if used >= 0.9 * MARGIN:
                break
        share = min(share * 0.97 * MARGIN / used, 1.0)
    seed.told["fit"] = {"tries": tries, "share": best or share}
    return best or share


def timed_apart(net: str, model: bytes) -> list[dict[str, float]]:
    """A part beside its whole net, in processes of their own."""
    cores = sorted(os.sched_getaffinity(0) | set(range(os.cpu_count() or 1)))[-FIT_PROCESSES:]
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        file.write(model)
        file.flush()
        running = [
            subprocess.Popen(
                [sys.executable, str(HERE / "cifar_latency.py"), "--apart", net, file.name,
                 "--core", str(core)],
                stdout=subprocess.PIPE,
            )
            for core in cores
        ]  # fmt: skip
        return [json.loads(process.communicate()[0]) for process in running]


def parts_of(asked: argparse.Namespace, material: Material) -> tuple[Any, Any, Any]:
    """Groups, what each part holds, its classes."""
    groups = chosen_groups(material, WholeTimes(0.0, 0.0), 16)
    held = cyclic_code(len(groups), asked.redundancy)
    return groups, held, held_classes(groups, held)


def alike_shape(seed: Seed, share: float) -> PartCut:
    """What is cut for all classes together."""
    material = seed.material
    everything = tuple(range(material.splits.num_classes))
    return cut_to(material, everything, share * material.whole_macs)


def cut(asked: argparse.Namespace, seed: Seed, share: float, shape: PartCut | None) -> None:
    """The parts of a seed."""
    material = seed.material
    seed.groups, seed.held, seed.classes = parts_of(asked, material)
    if shape is None:
        cuts = [cut_to(material, mine, share * material.whole_macs) for mine in seed.classes]
    else:
        widths = [len(kept) for kept in shape.kept]
        cuts = [
            PartCut(mine, best_units(material.scores.of_group(mine), widths), shape.omitted)
            for mine in seed.classes
        ]
    seed.take(cuts)


def compile_first(asked: argparse.Namespace, seed: Seed) -> None:
    """What is compiled for one part serves all; others may train meanwhile.

    Kernels of convolutions are not tried yet: that wants the GPU alone.
    """
    if not asked.compile:
        return
    first = replace(seed, parts=copy.deepcopy(seed.parts[:1]), classes=seed.classes[:1])
    try:
        compile_lesson(lesson_of(asked, first))
        say("compiled")
    except Exception as error:
        say(f"not compiled: {type(error).__name__}: {str(error)[:500]}")
        asked.compile = False


def compile_lesson(lesson: Lesson) -> None:
    """One step of a net that learns nothing."""
    if lesson.ask_teacher is not None:
        lesson.ask_teacher()
    learner = lesson.learners[0]
    learner.net.train()
    learner.set_rate(0.0)
    learner.learn(lesson.batch)


def retrained(asked: argparse.Namespace, seeds: list[Seed]) -> int:
    """All parts of all seeds; the steps that were made."""
    recipe = recipe_of(asked, seeds[0].told["seed"],
                       limit_s=left_s(asked, asked.retrain_limit))  # fmt: skip
    return learn([lesson_of(asked, seed) for seed in seeds], recipe,
                 lambda *far: progress("retrain parts", *far))  # fmt: skip


def lesson_of(asked: argparse.Namespace, seed: Seed) -> Lesson:
    splits = seed.material.splits
    return parts_lesson(seed.parts, seed.classes, seed.material.net, splits.train,
                        recipe_of(asked, seed.told["seed"]), splits.augment)  # fmt: skip


def control(asked: argparse.Namespace, seed: Seed) -> None:
    """Ordinary pruning at equal work: one net with the steps of all parts."""
    material, told = seed.material, seed.told
    everything = tuple(range(material.splits.num_classes))
    seed.take([cut_to(material, everything, asked.work * material.whole_macs)])
    splits, net = material.splits, seed.parts[0]
    seed.classes = [everything]
    compile_first(asked, seed)
    with turn():
        recipe = recipe_of(asked, told["seed"], steps=asked.control_steps,
                           limit_s=left_s(asked, asked.retrain_limit))  # fmt: skip
        made = learn([lesson_of(asked, seed)], recipe, lambda *far: progress("control", *far))
        scores = said_by([net], splits.test)[0][:, 1:]
    work = sum(multiplications(net, material.example).values()) / material.whole_macs
    told["control"] = {"test": accuracy(scores, splits.test.labels.cpu().numpy()), "work": work,
                       "steps": made, "asked_steps": asked.control_steps}  # fmt: skip
    say(f"control {told['control']}")
    write(asked, told, ".control.json")


def left_s(asked: argparse.Namespace, limit_s: float) -> float:
    """For a training that begins now; its results must be written too."""
    return max(min(limit_s, asked.until - time.time() - WRITING_S), 1.0)


if __name__ == "__main__":
    main()
