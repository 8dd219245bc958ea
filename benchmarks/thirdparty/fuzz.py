"""Train generated modules with hocket.prepare beside plain PyTorch, and compare everything.

    python benchmarks/thirdparty/fuzz.py --seeds 0:500 --rows fuzz.jsonl

A seed chooses modules (`fuzz_modules`), the optimizer and the batches; each of them is trained in
several modes. A row per seed and mode goes to ``--rows``, and rows that are there are not run
again. Losses, gradients, parameters, buffers, optimizer states, outputs and the states of all
generators must be those of plain PyTorch, or `prepare` refuses with a sentence.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fuzz_modules
import numpy as np
import torch
from fuzz_modules import ALL, WIDTH
from torch import nn

import hocket
from hocket.base.errors import HocketError, NoFeasiblePlanError
from hocket.base.units import parse_bytes

TOLERANCE = 1e-6
NUM_STEPS = 6
MODES = (
    "step", "accumulate", "clip", "own loop", "own loop, clip", "outputs", "evaluate", "checkpoint",
    "memory", "least memory", "half memory", "memory, own loop", "least memory, own loop",
    "half memory, accumulate", "half memory, clip", "least memory, outputs",
    "half memory, evaluate", "half memory, checkpoint", "least memory, async",
)  # fmt: skip


class Coupled(torch.optim.Optimizer):
    """An optimizer whose update of a parameter depends on all others, as D-Adaptation's does."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        trained = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.double().norm() for p in trained]).norm()
        for parameter in trained:
            self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
            lr = self.param_groups[0]["lr"]
            parameter.sub_((parameter.grad.double() / (norm + 1e-3) * lr).to(parameter.dtype))


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [{"params": trained[::2], "weight_decay": 0.1}, {"params": trained[1::2], "lr": 3e-3}],
        lr=1e-2,
    )


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    def shrink(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.999)

    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(shrink)
    return optimizer


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "two groups": two_groups,
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.1),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
    "coupled": lambda m: Coupled(m.parameters()),
    "hooked": hooked,
}


class Model(nn.Module):
    """Modules one after the other; some in a residual, some in lists of lists."""

    def __init__(self, kinds: list[type[nn.Module]], share: bool, returns: str) -> None:
        super().__init__()
        made = [kind() for kind in kinds]
        self.blocks = nn.ModuleList(made)
        self.order = list(range(len(made))) + ([0] if share else [])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.returns = returns

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        y = x
        for number in self.order:
            y = self.norm(self.blocks[number](y)) + 0.5 * x
        logits = self.head(y)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        if self.returns == "loss":
            return loss
        if self.returns == "dict":
            return {"loss": loss, "logits": logits, "words": ["a", None]}
        return loss, logits


class Case(NamedTuple):
    """Everything that a seed chooses."""

    kinds: list[type[nn.Module]]
    optimizer: str
    batches: list[dict[str, torch.Tensor]]
    share: bool
    returns: str
    schedules: bool

    def build(self) -> tuple[Model, torch.optim.Optimizer]:
        torch.manual_seed(1)
        fuzz_modules.GLOBAL_CACHE.clear()
        fuzz_modules.LazyCache.shared.clear()
        model = Model(self.kinds, self.share, self.returns)
        return model, OPTIMIZERS[self.optimizer](model)


def case_of(seed: int) -> Case:
    """The case of a seed: two or three modules, whose pairs differ from seed to seed."""
    draw = random.Random(seed)
    kinds = [ALL[seed % len(ALL)], *draw.choices(ALL, k=draw.randint(1, 2))]
    draw.shuffle(kinds)
    generator = torch.Generator().manual_seed(seed)
    shapes = [(4, 4)] * NUM_STEPS if draw.random() < 0.7 else [(4, 4), (4, 6), (2, 4)] * 2
    batches = [
        {
            "x": torch.randn(b, t, WIDTH, generator=generator),
            "target": torch.randint(0, 3, (b, t), generator=generator),
        }
        for b, t in shapes
    ]
    optimizer = draw.choice(list(OPTIMIZERS))
    returns = draw.choice(("loss", "dict", "tuple"))
    return Case(kinds, optimizer, batches, draw.random() < 0.3, returns, draw.random() < 0.3)


def modes_of(seed: int, number: int) -> list[str]:
    """Modes that a seed is trained in: some of all, in turn."""
    first = seed * number + seed // len(MODES)
    return list(dict.fromkeys(MODES[(first + 5 * k) % len(MODES)] for k in range(number)))


def seed_all() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def generators() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), str(np.random.get_state())]


def scheduler_of(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8) if case.schedules else None


def loss_of(returned: Any) -> torch.Tensor:
    if isinstance(returned, dict):
        return returned["loss"]
    return returned[0] if isinstance(returned, tuple) else returned


def plain(case: Case, mode: str) -> dict[str, Any]:
    """The training in plain PyTorch."""
    model, optimizer = case.build()
    schedule = scheduler_of(case, optimizer)
    seed_all()
    every = 2 if "accumulate" in mode else 1
    found: dict[str, Any] = {}
    for step, batch in enumerate(case.batches):
        if "checkpoint" in mode and step == 3:
            # What is saved and loaded again begins with fresh attributes.
            state, optimizer_state = model.state_dict(), optimizer.state_dict()
            rates = None if schedule is None else schedule.state_dict()
            random_state = generators()
            model, optimizer = case.build()
            model.load_state_dict(state)
            optimizer.load_state_dict(optimizer_state)
            schedule = scheduler_of(case, optimizer)
            if schedule is not None:
                schedule.load_state_dict(rates)
            torch.set_rng_state(random_state[0])
        if "evaluate" in mode and step in (1, 4):
            model.eval()
            with torch.no_grad():
                found[f"evaluated {step}"] = loss_of(model(**batch)).detach().clone()
            model.train()
        returned = model(**batch)
        loss = loss_of(returned)
        (loss / every if every > 1 else loss).backward()
        found[f"loss {step}"] = loss.detach().clone()
        if "outputs" in mode and case.returns != "loss":
            out = returned["logits"] if case.returns == "dict" else returned[1]
            found[f"outputs {step}"] = out.detach().clone()
        if (step + 1) % every == 0:
            if "clip" in mode:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if step == NUM_STEPS - 1:
                break
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
    return found | final(model, optimizer, mode)


def final(model: nn.Module, optimizer: torch.optim.Optimizer, mode: str) -> dict[str, Any]:
    found: dict[str, Any] = {f"state {n}": t for n, t in model.state_dict().items()}
    if "own loop" in mode:
        found |= {f"gradient {n}": p.grad for n, p in model.named_parameters()}
    for at, state in optimizer.state_dict()["state"].items():
        found |= {f"optimizer {at} {n}": v for n, v in state.items() if isinstance(v, torch.Tensor)}
    return found | {"torch's generator": torch.get_rng_state()}


def prepared(case: Case, mode: str) -> tuple[Model, torch.optim.Optimizer, Any]:
    model, optimizer = case.build()
    options: dict[str, Any] = {}
    if "accumulate" in mode:
        options["accumulate"] = 2
    if "clip" in mode and "own" not in mode:
        options["clip_norm"] = 0.1
    if "outputs" in mode:
        options["outputs"] = True
    if "async" in mode:
        options["async_update"] = True
    loss = (lambda returned: returned[0]) if case.returns == "tuple" else None
    if "memory" in mode:
        options["memory"] = budget_of(case, mode, options, loss)
    before = generators()
    train = hocket.prepare(model, optimizer, case.batches[0], loss=loss, **options)
    after = generators()
    if not torch.equal(before[0], after[0]) or before[1:] != after[1:]:
        raise AssertionError("prepare moved a generator")
    return model, optimizer, train


def budget_of(case: Case, mode: str, options: dict[str, Any], loss: Any) -> int | str:
    """The least budget that is possible, or the middle between it and the plain step's memory."""
    if not mode.startswith(("least", "half")):
        return "1GiB"
    model, optimizer = case.build()
    options = {**options, "loss": loss}
    try:
        hocket.prepare(model, optimizer, case.batches[0], memory=1, **options)
    except NoFeasiblePlanError as error:
        least = parse_bytes(str(error.hint).partition('"')[2].partition('"')[0])
        if mode.startswith("least"):
            return least
        model, optimizer = case.build()
        train = hocket.prepare(model, optimizer, case.batches[0], memory="1GiB", **options)
        return (least + train.memory.peak_bytes) // 2
    return "1GiB"


def ours(case: Case, mode: str) -> dict[str, Any]:
    """The same training by hocket."""
    model, optimizer, train = prepared(case, mode)
    schedule = scheduler_of(case, optimizer)
    seed_all()
    every = 2 if "accumulate" in mode else 1
    found: dict[str, Any] = {}
    for step, batch in enumerate(case.batches):
        if "checkpoint" in mode and step == 3:
            state = train.state_dict()
            rates = None if schedule is None else schedule.state_dict()
            state = {**state, "model": {n: t.clone() for n, t in state["model"].items()}}
            kept = random.getstate(), np.random.get_state()
            model, optimizer, train = prepared(case, mode)
            random.setstate(kept[0])
            np.random.set_state(kept[1])
            train.load_state_dict(state)
            schedule = scheduler_of(case, optimizer)
            if schedule is not None:
                schedule.load_state_dict(rates)
        if "evaluate" in mode and step in (1, 4):
            found[f"evaluated {step}"] = train.evaluate(batch).detach().clone()
        if "own loop" in mode:
            loss = train(batch)
            loss.backward()
            if "clip" in mode:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        else:
            loss = train.step(batch)
        found[f"loss {step}"] = loss.detach().clone()
        if "outputs" in mode and case.returns != "loss":
            out = train.outputs["logits"] if case.returns == "dict" else train.outputs[1]
            if out is None:
                raise HocketError("outputs are not kept")
            found[f"outputs {step}"] = out.detach().clone()
        if step == NUM_STEPS - 1:
            break
        if "own loop" in mode:
            optimizer.zero_grad()
        if schedule is not None and (step + 1) % every == 0:
            schedule.step()
    train.state_dict()
    return found | final(model, optimizer, mode) | {"how": how(train)}


def how(train: Any) -> str:
    name = type(train._strategy).__name__
    return {"TracedModel": "ops", "PlacedModules": "modules", "BudgetedModel": "budget"}.get(
        name, name
    ) + ("*" if train.lost else "")


class Row(NamedTuple):
    """How one seed went in one mode."""

    seed: int
    mode: str
    result: str
    """``equal``, ``close``, ``refused``, ``wrong`` or ``failed``; ``plain`` if PyTorch failed."""
    how: str
    worst: float
    what: str
    modules: str
    seconds: float


def run(seed: int, mode: str) -> Row:
    """Train the case of a seed in one mode, twice, and compare."""
    case, started = case_of(seed), time.perf_counter()
    names = "+".join(kind.__name__ for kind in case.kinds) + f" {case.optimizer} {case.returns}"
    row = Row(seed, mode, "equal", "", 0.0, "", names, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted = plain(case, mode)
        except Exception as error:  # PyTorch itself refuses this case
            return row._replace(result="plain", what=f"{type(error).__name__}: {error}"[:300])
        try:
            found = ours(case, mode)
        except HocketError as error:
            row = row._replace(result="refused", what=str(error)[:300])
        except Exception as error:  # a bare error of any kind is a failure of hocket's
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}:{frame.lineno}"
            told = f"{type(error).__name__}: {error}"[:300]
            row = row._replace(result="failed", what=f"{told} at {place}")
        else:
            row = compared(row._replace(how=str(found.pop("how"))), wanted, found)
    return row._replace(seconds=round(time.perf_counter() - started, 2))


def compared(row: Row, wanted: dict[str, Any], found: dict[str, Any]) -> Row:
    worst, where = 0.0, ""
    for name in {**wanted, **found}:
        off = distance(wanted.get(name), found.get(name))
        if off > worst:
            worst, where = off, name
    result = "equal" if not worst else "close" if worst <= TOLERANCE else "wrong"
    return row._replace(result=result, worst=worst, what=where)


def distance(wanted: Any, found: Any) -> float:
    """Largest difference, relative to the largest value; infinite where one is missing."""
    if wanted is None or found is None:
        return 0.0 if wanted is found else float("inf")
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return float("inf")
    if torch.equal(wanted, found):
        return 0.0
    one, other = wanted.double(), found.double()
    both_nan = one.isnan() & other.isnan()
    off = torch.where(both_nan, 0.0, (one - other).abs()).max() / (
        one.abs().nan_to_num().max() + 1e-12
    )
    return float("inf") if off.isnan() else max(float(off), 1e-300)


def known_rows(path: Path) -> Iterator[Row]:
    if path.exists():
        for line in path.read_text().splitlines():
            yield Row(**json.loads(line))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", default="0:20", help="first:last, last left out")
    parser.add_argument("--modes", type=int, default=3, help="modes per seed")
    parser.add_argument("--mode", choices=MODES, help="this mode only")
    parser.add_argument("--rows", type=Path, default=Path("fuzz.jsonl"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    options = parser.parse_args()
    first, last = map(int, options.seeds.split(":"))
    rows = {(row.seed, row.mode): row for row in known_rows(options.rows)}
    torch.set_num_threads(1)
    ends = time.monotonic() + options.seconds
    with options.rows.open("a") as file:
        for seed in range(first, last):
            for mode in [options.mode] if options.mode else modes_of(seed, options.modes):
                if (seed, mode) in rows or time.monotonic() > ends:
                    continue
                rows[seed, mode] = row = run(seed, mode)
                file.write(json.dumps(row._asdict()) + "\n")
                file.flush()
                if row.result not in ("equal", "close"):
                    print(*row, flush=True)
    print(table(rows.values()))
    sys.exit(any(row.result in ("wrong", "failed") for row in rows.values()))


def table(rows: Any) -> str:
    """Counts of results by mode."""
    results = ("equal", "close", "refused", "plain", "failed", "wrong")
    counts = Counter((row.mode, row.result) for row in rows)
    lines = ["| mode | " + " | ".join(results) + " |", "|---" * (1 + len(results)) + "|"]
    for mode in MODES:
        lines.append(f"| {mode} | " + " | ".join(str(counts[mode, r]) for r in results) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
