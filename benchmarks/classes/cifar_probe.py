"""How long a step of all parts takes in each form that it can have.

    CIFAR_SCANS=FOLDER python benchmarks/classes/cifar_probe.py --seconds 40 --json FILE
    CIFAR_SCANS=FOLDER python benchmarks/classes/cifar_probe.py --toy --json FILE

Three lessons of five parts of ResNet-56 (0.345 of its work, one form), as `cifar_gpu.py` trains
them: every part on a stream of its own, the parts of a lesson stacked as one net, each of these
compiled, and what the teacher, the width of numbers, the order of channels in memory and the size
of a batch change: milliseconds of a step, and for two forms the kernels where they go
(`torch.profiler`). While forms are compiled others may have the GPU; then all are timed in one turn
(``GPU_TURN``), within ``--seconds``.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cifar_gpu import alike_shape, arguments, compile_lesson, cut, recipe_of, trained, turn
from cifar_seed import Seed, say

from hocket.classes import stepping, training
from hocket.classes.stepping import Lesson

Work = Callable[[argparse.Namespace, Seed, str], dict[str, Any]]
LESSONS = 3
TIMED_STEPS = 49
"""Three times as many as are queued before the clock is looked at, and one."""
FORMS: dict[str, dict[str, Any]] = {
    "apart": {},
    "stacked": {"stacked": True},
    "stacked compiled": {"stacked": True, "compiled": True},
    "stacked, channels in planes": {"stacked": True, "planes": True},
    "stacked, no teacher": {"stacked": True, "soft_weight": 0.0},
    "stacked, batch 512": {"stacked": True, "batch": 512},
    "stacked, batch 128": {"stacked": True, "batch": 128},
    "compiled": {"compiled": True},
    "stacked, float32": {"stacked": True, "wide": True},
}
NOT_IN_TOYS = {"compiled", "batch"}
PROFILED = ("apart", "stacked")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--forms", nargs="+", choices=tuple(FORMS), default=list(FORMS))
    parser.add_argument("--kernels", default="4", help="tried for each convolution")
    parser.add_argument("--wholes", default=None)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    mine = parser.parse_args()
    given = ["--net", "resnet56", "--seeds", "0", "--parts", "5", "--redundancy", "4", "--alike",
             "--work", "0.345", "--batch", "256", "--rate", "0.15", "--train", "0",
             "--kernels", mine.kernels, "--out", str(mine.json.parent / "probe")]  # fmt: skip
    given += ["--wholes", mine.wholes] if mine.wholes else []
    given += ["--device", "cpu", "--batch", "8"] if mine.toy else []
    asked = arguments(given)
    asked.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, asked.kernels
    warnings.filterwarnings("error", message="steps cannot be recorded")
    (seed,) = trained(asked)
    cut(asked, seed, asked.work, alike_shape(seed, asked.work))
    forms = [name for name in mine.forms if not mine.toy or not set(FORMS[name]) & NOT_IN_TOYS]
    rows: dict[str, Any] = {name: tried(compiled, asked, seed, name) for name in forms}
    with turn():
        until_s = time.time() + mine.seconds
        for name in forms:
            if time.time() > until_s:
                break
            if "failed" not in rows[name]:
                rows[name] |= tried(measured, asked, seed, name)
            say(f"{name}: {json.dumps(rows[name])}")
        # After all timings: a process that was once profiled is slower.
        for name in set(PROFILED) & set(forms) if not mine.toy else ():
            rows[name] |= by_kernel(lessons_of(asked, seed, FORMS[name], 1)[0])
    mine.json.write_text(json.dumps(rows))


def tried(work: Work, asked: argparse.Namespace, seed: Seed, name: str) -> dict[str, Any]:
    try:
        return work(asked, seed, name)
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}


def compiled(asked: argparse.Namespace, seed: Seed, name: str) -> dict[str, Any]:
    """Compile a form that is to be; what is compiled serves all nets of one shape."""
    if not FORMS[name].get("compiled"):
        return {}
    begun_s = time.time()
    (lesson,) = lessons_of(asked, seed, FORMS[name], 1)
    compile_lesson(lesson)
    say(f"{name}: compiled")
    return {"compiled_s": time.time() - begun_s}


def measured(asked: argparse.Namespace, seed: Seed, name: str) -> dict[str, Any]:
    """One form: how long it takes to record, and to step."""
    form = dict(FORMS[name])
    form_of, precision = training._form_of, stepping.mixed_precision
    if form.pop("planes", False):
        training._form_of = lambda *_: torch.contiguous_format
    if form.pop("wide", False):
        torch.backends.cuda.matmul.allow_tf32 = True
        no_cast = torch.autocast(asked.device, torch.bfloat16, enabled=False)
        training.mixed_precision = stepping.mixed_precision = lambda _: no_cast
    try:
        return timed(asked, seed, form)
    finally:
        training._form_of = form_of
        training.mixed_precision = stepping.mixed_precision = precision
        torch.backends.cuda.matmul.allow_tf32 = False


def timed(asked: argparse.Namespace, seed: Seed, form: dict[str, Any]) -> dict[str, Any]:
    is_cuda = asked.device != "cpu"
    lessons = lessons_of(asked, seed, form, LESSONS)
    recipe = recipe_of(asked, 0, steps=TIMED_STEPS if is_cuda else 3)
    seen: list[tuple[int, float]] = []
    begun_s = time.time()
    training.learn(lessons, recipe, lambda done, _: seen.append((done, time.time())))
    # The clock is right where the GPU has just been waited for: at the first step of each sixteen.
    (first, first_s), *_, (last, last_s) = [
        each for each in seen if each[0] % 16 == 1 or not is_cuda
    ]
    step_s = (last_s - first_s) / (last - first)
    images = LESSONS * len(seed.parts) * form.get("batch", asked.batch)
    return {"step_ms": 1e3 * step_s, "part_images_per_s": images / step_s,
            "recorded_s": first_s - begun_s, "nets": len(lessons[0].learners)}  # fmt: skip


def lessons_of(
    asked: argparse.Namespace, seed: Seed, form: dict[str, Any], count: int
) -> list[Lesson]:
    """As a training has them, of copies."""
    splits = seed.material.splits
    return [
        training.parts_lesson(copy.deepcopy(seed.parts), seed.classes, seed.material.net,
                              splits.train, recipe_of(asked, 0, **form), splits.augment)
        for _ in range(count)
    ]  # fmt: skip


def by_kernel(lesson: Lesson) -> dict[str, Any]:
    """The kernels that take longest in one step of one lesson, in microseconds."""
    from torch.profiler import ProfilerActivity, profile

    try:
        for learner in lesson.learners:
            learner.net.train()
            learner.set_rate(0.0)
            learner.learn(lesson.batch)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for learner in lesson.learners:
                learner.learn(lesson.batch)
            torch.cuda.synchronize()
        rows = sorted(profiled.key_averages(), key=lambda each: -each.device_time_total)
    except Exception as error:
        return {"kernels": f"{type(error).__name__}: {error}"}
    return {
        "kernels_us": sum(each.device_time_total for each in rows),
        "num_kernels": sum(each.count for each in rows),
        "kernels": [(each.key[:90], each.count, each.device_time_total) for each in rows[:24]],
    }


if __name__ == "__main__":
    main()
