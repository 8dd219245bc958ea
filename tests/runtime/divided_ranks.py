"""One rank of divided trainings beside the same training in one process: how far they differ."""

import copy
import os
import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from runtime.divided_models import (
    bert,
    gpt2,
    mlp,
    opt,
    qwen2,
    resnet,
    single,
    unbound,
    words,
)
from safetensors.torch import save_file
from torch import nn

import hocket
from hocket.base.errors import UsageError
from hocket.capture import CaptureWarning
from hocket.capture.sizes import capture_sizes
from hocket.graph.graph import Phase
from hocket.plan.files import SavedPlan, write_plan
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.sections import Communication, Parallel, Priority, Replica, Waves
from hocket.planners.parallel.closed_form import block_edges
from hocket.runtime.planned_optimizer import planned_update
from hocket.transformer import ParallelConfig

STEPS, ACCUMULATE, CLIP = 12, 2, 0.5


CASES = {
    "unequal": (resnet, ParallelConfig(data=2, global_batch=9, shares=(6, 3))),
    "owners": (mlp, ParallelConfig(data=2, global_batch=9, shares=(4, 5), zero=1)),
    "sharded": (mlp, ParallelConfig(data=2, global_batch=9, shares=(5, 4), zero=3,
                                    recompute="full")),
    "pipeline": (mlp, ParallelConfig(pipeline=2, global_batch=9, microbatch=4)),
    "tied-split": (words, ParallelConfig(pipeline=2, global_batch=8, microbatch=2,
                                         schedule="zb-h1")),
    "looped": (words, ParallelConfig(pipeline=2, chunks=2, global_batch=8, microbatch=2,
                               schedule="interleaved", layers=(0, 1, 1, 0))),
    "gpt2-pipeline": (gpt2, ParallelConfig(pipeline=2, global_batch=8, microbatch=4)),
    "gpt2-tensor": (gpt2, ParallelConfig(tensor=2, global_batch=8)),
    "qwen2-tensor": (qwen2, ParallelConfig(tensor=2, global_batch=8)),
    "single": (single, ParallelConfig(data=2, global_batch=9, shares=(5, 4), zero=3)),
    "qwen2-sharded": (qwen2, ParallelConfig(data=2, global_batch=8, shares=(5, 3), zero=3)),
    "opt-tensor": (opt, ParallelConfig(tensor=2, global_batch=8)),
    "bert-tensor": (bert, ParallelConfig(tensor=2, global_batch=8)),
    "budget": (words, ParallelConfig(data=2, global_batch=8, shares=(5, 3))),
    "hollow": (words, ParallelConfig(pipeline=2, global_batch=8, microbatch=4)),
    "placed": (mlp, None),
    "accumulated": (mlp, (((), (3, 2)), ((), (2, 2)))),
    "planned-sums": (mlp, (((), (5,)), ((), (4,)))),
    "parts": (words, (((), (5, 3)),)),
    "waves": (mlp, (((), (3, 2)), ((), (2, 2)))),
    "turns": (unbound, tuple(((0.2, 0.5, 0.8), (size,)) for size in (3, 2, 2, 1))),
    "cut": (words, (((0.6,), (3, 3, 2)),)),
    "cut-parts": (words, (((0.6,), (3, 3, 2)),)),
    "put-off": (words, (((0.3, 0.5, 0.7), (2, 1, 1, 2, 1, 1)),)),
    "uneven": (words, (((), (2, 1)), ((0.3, 0.7), (2, 2, 1)))),
    "data-pipeline": (words, ParallelConfig(data=2, pipeline=2, global_batch=8, microbatch=2,
                                      shares=(5, 3), zero=1)),
    "tensor-pipeline": (words, ParallelConfig(tensor=2, pipeline=2, global_batch=8, microbatch=4)),
    "data-tensor": (words, ParallelConfig(data=2, tensor=2, global_batch=8, zero=3)),
}  # fmt: skip
"""What is trained, and how it is divided; for shares where each replica is cut, in parts of the
forward pass, and its microbatches."""


PARTS = {"parts": 2, "cut-parts": 2}
"""Into which matrices are divided."""
MEMORY = {"budget": "130KiB"}
"""Budgets of each device; the plain step of five samples holds twice as much."""
HOLDS_LESS = ("accumulated", "uneven", "cut-parts")
"""Shares whose blocks run again and whose updates are on the host."""


def optimizer_of(model):
    parameters = list(model.parameters())
    groups = [
        {"params": parameters[::2], "weight_decay": 0.1},
        {"params": parameters[1::2], "lr": 3e-3},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def shared(graph, replicas, *, holds_less, parts=1, schedule="1f1b", in_turn=False):
    """A plan of shares; where they hold less, all blocks are recomputed."""
    edges = block_edges(graph) if holds_less else ()
    num_devices = sum((len(cuts) + 1) * parts for cuts, _ in replicas)
    if in_turn:
        num_devices = len(replicas)
    problem = make_problem(graph, f"{num_devices}xcpu-core")
    forward = np.flatnonzero(graph.op_phase == Phase.FORWARD)
    names = iter(problem.cluster.device_names)
    if in_turn:  # waves over the same devices, each rotated by one more
        every = problem.cluster.device_names
        names = iter([n for wave in range(len(every)) for n in every[wave:] + every[:wave]])
    shares = Parallel(replicas=tuple(
        Replica(
            devices=tuple(next(names) for _ in range((len(cuts) + 1) * parts)), microbatches=sizes,
            cuts=tuple(int(forward[int(cut * len(forward))]) for cut in cuts),
            recomputed=tuple(pairwise(edges)), update="host" if holds_less else "device",
        )
        for cuts, sizes in replicas
    ), tensor=parts, schedule=schedule)  # fmt: skip
    plan = Plan(planner="shares").having(shares).claiming(step_s=1.0)
    return SavedPlan(problem, plan)


def write_plans(folder, cases):
    """Plans of the cases that are no configs, once for all ranks."""
    for name in cases:
        if name not in CASES or isinstance(CASES[name][1], ParallelConfig):
            continue
        torch.manual_seed(0)
        model, batches, forward = CASES[name][0]()
        update = planned_update(optimizer_of(model), model)
        graph = capture_sizes(model, batches[0], forward=forward, optimizer=update, device="cpu")
        saved = plan_of(name, graph)
        write_plan(folder / f"{name}.json", saved.problem, saved.plan)


def plan_of(name, graph):
    """The plan of a case for a recorded step."""
    replicas = CASES[name][1]
    if replicas is None:  # single ops on the devices of two ranks
        return hocket.plan_graph(graph, "2xv100-16g", planners="layer-blocks")
    saved = shared(graph, replicas, holds_less=name in HOLDS_LESS, parts=PARTS.get(name, 1),
                   in_turn=name == "turns",
                   schedule="zb-h1" if name == "put-off" else "1f1b")  # fmt: skip
    if name == "planned-sums":  # by trees over the links, which are measured when they begin
        devices = saved.problem.cluster.device_names
        trees = Communication("allreduce", "packed trees", devices, devices[0], ())
        return replace(saved, plan=saved.plan.having(trees))
    if name == "waves":  # the microbatches of each rank on two streams
        return replace(saved, plan=saved.plan.having(Waves(lead=5)))
    return saved


def start(name, folder):
    build, config = CASES[name]
    torch.manual_seed(0)
    model, batches, forward = build()
    twin = copy.deepcopy(model)
    # What ranks draw for themselves must not matter: the first rank's weights are taken.
    if int(os.environ["RANK"]):
        for parameter in model.parameters():
            parameter.data.mul_(2.0)
    weights = None
    if name == "hollow":  # each rank reads its own part of a file, and nothing else
        weights = folder / "weights.safetensors"
        if not int(os.environ["RANK"]):
            save_file(model.state_dict(), weights)
        model = model.to("meta")
    optimizer, plain = optimizer_of(model), optimizer_of(twin)
    if not isinstance(config, ParallelConfig):
        config = folder / f"{name}.json"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        train = hocket.prepare(
            model, optimizer, batches[0], plan=config, forward=forward, accumulate=ACCUMULATE,
            clip_norm=CLIP, weights=weights, memory=MEMORY.get(name),
        )  # fmt: skip
    return train, twin, plain, batches, forward


def compare(name, folder, steps=None):
    """12 steps with accumulation, clipping, a schedule and a checkpoint, beside plain PyTorch."""
    train, twin, plain, batches, forward = start(name, folder)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.7) for o in (train.optimizer, plain)]
    held = sum(p.numel() if not hasattr(p, "to_local") else p.to_local().numel()
               for p in train.model.parameters() if not p.is_meta)  # fmt: skip
    loss_error = 0.0
    # Hugging Face's models take long to record, so they make fewer steps.
    if steps is None:
        steps = 4 if CASES[name][0] in (gpt2, qwen2, opt, bert) else STEPS
    for number in range(1, steps + 1):
        batch = batches[number % 3]
        if number == steps // 2:  # in the middle of an accumulated batch
            state = copy.deepcopy(train.state_dict())
            for tensor in train.model.parameters():
                if not tensor.is_meta:
                    tensor.data.zero_()
            train.load_state_dict(state)
        loss = train.step(batch).item()
        expected = forward(twin, batch)["loss"]
        (expected / ACCUMULATE).backward()
        loss_error = max(loss_error, abs(loss - expected.item()))
        if number % ACCUMULATE == 0:
            nn.utils.clip_grad_norm_(twin.parameters(), CLIP)
            plain.step()
            plain.zero_grad()
            for schedule in schedules:
                schedule.step()
    state = train.state_dict()
    twin.eval()
    with torch.no_grad():
        returned = forward(twin, batches[0])
    found = train.predict(batches[0]) if steps == STEPS else returned
    return {
        "loss": loss_error,
        "weights": max(_error(state["model"][n], t) for n, t in twin.state_dict().items()),
        "states": _state_error(state["optimizer"], plain.state_dict()),
        "keys": list(state["model"]) == list(twin.state_dict()),
        "evaluate": steps == STEPS
        and abs(train.evaluate(batches[0]).item() - returned["loss"].item()),
        "predict": _error(found["scores"], returned["scores"]),
        "held": held,
        "blocks": len(train.memory.section.blocks) if train.memory else 0,
        "total": sum(p.numel() for p in twin.parameters()),
    }


def save(folder):
    """Ten steps on one config, saved whole and in parts."""
    train, *_, batches, _ = start("tied-split", folder)
    for number in range(10):
        train.step(batches[number % 3])
    train.save(folder / "whole")
    train.save(folder / "parts", sharded=True)


def resume(name, folder):
    """Ten more steps from each checkpoint on another config."""
    states = []
    for kind in ("whole", "parts"):
        train, twin, plain, batches, forward = start(name, folder)
        train.load(folder / kind / "step-10")
        for number in range(10, 20):
            train.step(batches[number % 3])
        states.append(train.state_dict()["model"])
    for number in range(20):
        (forward(twin, batches[number % 3])["loss"] / ACCUMULATE).backward()
        if number % ACCUMULATE:
            nn.utils.clip_grad_norm_(twin.parameters(), CLIP)
            plain.step()
            plain.zero_grad()
    return {
        f"resumed {kind}": max(_error(state[n], t) for n, t in twin.state_dict().items())
        for kind, state in zip(("whole", "parts"), states, strict=True)
    }


def travelled():
    """Unequal shares whose gradients travel by priority, beside the same training in one process:
    a schedule, a checkpoint in the middle, and steps of the person's own."""
    torch.manual_seed(0)
    model, batches, forward = mlp()
    model, twin = model.float(), copy.deepcopy(model).float()
    batches = [(rows.float(), labels) for rows, labels in batches]
    optimizer, plain = optimizer_of(model), optimizer_of(twin)
    update = planned_update(optimizer, model)
    graph = capture_sizes(model, batches[0], forward=forward, optimizer=update, device="cpu")
    saved = shared(graph, (((), (6,)), ((), (3,))), holds_less=False)
    saved = replace(saved, plan=saved.plan.having(Priority(slice_bytes=64)))
    train = hocket.prepare(model, optimizer, batches[0], plan=saved, forward=forward)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.7) for o in (optimizer, plain)]
    loss_error = 0.0
    for number in range(8):
        batch = batches[number % 3]
        if number == 4:
            state = copy.deepcopy(train.state_dict())
            for parameter in model.parameters():
                parameter.data.zero_()
            train.load_state_dict(state)
        if number % 3 == 2:
            loss = train(batch)
            loss.backward()
            optimizer.step()
        else:
            loss = train.step(batch)
        expected = forward(twin, batch)["loss"]
        expected.backward()
        plain.step()
        plain.zero_grad()
        for schedule in schedules:
            schedule.step()
        loss_error = max(loss_error, abs(loss.item() - expected.item()))
    evaluated = train.evaluate(batches[0]).item()
    state = train.state_dict()
    return {
        "loss": loss_error,
        "weights": max(_error(state["model"][n], t) for n, t in twin.state_dict().items()),
        "states": _state_error(state["optimizer"], plain.state_dict()),
        "evaluate": abs(evaluated - forward(twin, batches[0])["loss"].item()),
        "crosses": train._strategy._propagation.crosses,
    }


def _error(found, expected):
    return float((found.double() - expected.double()).abs().max())


def _state_error(found, expected):
    assert found["state"].keys() == expected["state"].keys()
    return max(
        _error(torch.as_tensor(found["state"][index][key]), torch.as_tensor(value))
        for index, slots in expected["state"].items()
        for key, value in slots.items()
    )


def shuffled(tell):
    """The errors of a rank whose first batch differs from that of rank 0."""
    found = []
    for degrees in ({"data": 2}, {"pipeline": 2}):
        torch.manual_seed(0)
        model, batches, forward = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        plan = ParallelConfig(**degrees, global_batch=9, microbatch=3)
        train = hocket.prepare(model, optimizer, batches[0], forward=forward, plan=plan)
        rows, labels = batches[0]
        try:
            train.step((rows + int(os.environ["RANK"]), labels))
        except UsageError as error:
            found.append(f"{error.message}; {error.hint}")
    return found


def differences(tell, folder, cases, steps=None):
    """By case, what this rank finds."""
    found = {}
    for case in cases:
        what, _, name = case.rpartition(":")
        if case == "save":
            save(folder)
        elif case == "priority":
            found[case] = travelled()
        elif what == "resume":
            found[case] = resume(name, folder)
        else:
            found[case] = compare(case, folder, steps)
    return found
