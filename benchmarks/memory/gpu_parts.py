"""Parts of a run on a GPU: each makes its rows in a process of its own (`h200`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from budget_case import Case
from gpu_models import (
    DEVICE,
    DeepResNet,
    Listener,
    LongRnn,
    drawn,
    forward,
    gpt,
    plain_forward,
    word_batch,
)
from gpu_rows import (
    GIB,
    HostClock,
    Laps,
    LockClock,
    cap_to,
    clear,
    copy_rates,
    measured,
    peaks,
    product_rate,
    spent,
    timed_steps,
    update_rates,
)
from gpu_run import Run
from gpu_systems import (
    activation_budget,
    adamw,
    checkpointed,
    fsdp_offload,
    ours,
    plain,
    saved_on_cpu,
)
from skips import net as u_net
from torch import nn

from hocket.graph.graph import Stream
from hocket.hardware.host_route import host_route
from hocket.plan.make import find_cluster
from hocket.plan.sections import Memory
from hocket.planners.memory.frontier import Frontier
from hocket.runtime.offload.host_adam import matches_torch
from hocket.runtime.offload.host_bandwidth import measure_host_bandwidth, with_measured_host
from hocket.simulate.rewriting.step import moved_bytes

RESERVES = (0.3 / 8, 1 / 8)
"""Of a cap, left to the gaps of the allocator; the second where the first is too little."""
ACTIVATION_BUDGET = 0.1
STEPS = 6
"""Of the large model that are timed."""
OTHER_HOSTS = (0.75,)
"""Rates of updates on the host that other mixes are planned for, over the detected one."""
NUM_CALLED = 3
"""Steps that are called before one is captured: the first makes the optimizer's state."""
HOLD_ALL = {
    "eager": plain,
    "checkpointing": checkpointed,
    "save_on_cpu": saved_on_cpu,
    "activation_memory_budget": activation_budget(ACTIVATION_BUDGET),
}
"""Systems that hold all parameters and their state on the device."""


def is_out_of_memory(row: dict[str, Any]) -> bool:
    """Whether a row failed because the cap was too small."""
    return "OutOfMemory" in row.get("error", "")


def warm(run: Run) -> None:
    """A small plan on the processor, so that kernels of the planner are compiled on disk."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    case = Case(model, torch.zeros(4, 8), lambda net, x: net(x).square().mean())
    case.budgets(2)
    run.book.add("warm", {"seconds": case.frontier.plan_seconds})


def rates(run: Run) -> None:
    """What the machine's buses and cores do."""
    size = 2**28 if DEVICE == "cuda" else 2**20
    found = {**copy_rates(size), **update_rates(size // 4, size)}
    names = ("all_at_once_in_gbps", "all_at_once_out_gbps", "all_at_once_updates_gbps")
    at_once = measure_host_bandwidth(torch.device(DEVICE))
    found |= {name: rate / 1e9 for name, rate in zip(names, at_once, strict=True)}
    if DEVICE == "cuda":
        found["bf16_tflops"] = product_rate()
    run.book.add("rates", found)


def uncapped(run: Run) -> None:
    """The large model with all memory that there is."""
    micro = min(4, run.micro)
    row = measured(plain, run.gpt(DEVICE), word_batch(run.sizes), micro=micro)
    run.book.add("uncapped", {"layers": run.layers, "width": run.width, **row})


def large(run: Run) -> None:
    """The large model under each cap, planned once and chosen as ``hocket.prepare`` chooses."""
    case = _large_case(run)
    for cap in run.caps:
        _under_cap(run, case, cap, "hocket")


def mixes(run: Run) -> None:
    """The same under the first cap as it would be planned for a host of another rate."""
    case = _large_case(run)
    cluster = case.frontier.problem.cluster
    for factor in OTHER_HOSTS:
        host_update_bps = factor * cluster.host_update_bps
        case.plan(replace(cluster, host_update_bps=host_update_bps))
        _under_cap(run, case, run.caps[0], f"hocket, planned for {host_update_bps / 1e9:.0f} GB/s")


def _large_case(run: Run) -> Case:
    laps, device = Laps(), torch.device(DEVICE)
    model = run.gpt("cpu")()
    laps.end("drawn")
    cluster = with_measured_host(find_cluster("auto"), device)
    laps.end("rated")
    case = Case(model, word_batch(run.sizes), forward, on=cluster, device=device)
    laps.end("planned")
    route = host_route(cluster, cluster.devices[0])
    run.book.add("planned", {"seconds": case.frontier.plan_seconds, "laps_s": laps,
                             "host_update_gbps": cluster.host_update_bps / 1e9,
                             "link_gbps": route.in_bps / 1e9,
                             "out_gbps": route.out_bps / 1e9})  # fmt: skip
    return case


def _under_cap(run: Run, case: Case, cap: int, system: str) -> None:
    for part in RESERVES:
        case.model = case.model or run.gpt("cpu")()
        row = _case_row(case, int(cap * (1 - part)), cap)
        row = {"layers": run.layers, "width": run.width, "system": system, **row}
        if not is_out_of_memory(run.book.add("large", row)):
            break


def _case_row(case: Case, budget: int, cap: int) -> dict[str, Any]:
    """Seconds and peak of what is chosen for a budget; the case's model is used up."""
    row: dict[str, Any] = {"cap_gib": cap / GIB, "budget_gib": budget / GIB}
    row["params"] = sum(p.numel() for p in case.model.parameters())
    clear()
    laps, train = Laps(), None
    row["laps_s"] = laps
    try:
        kept = case.chosen(budget)
        assert kept.peak_bytes is not None
        row |= {"predicted_step_s": kept.step_s, "predicted_peak_gib": kept.peak_bytes / GIB,
                "loss_chunks": kept.section.loss_chunks, "mix": mix_of(kept.section),
                "predicted": predicted_busy_s(case.frontier, kept.section)}  # fmt: skip
        laps.end("chosen")
        cap_to(cap)
        train = case.loop(case.model, kept, adamw(case.model))
        laps.end("settled")
        with HostClock() as clock, LockClock() as locked:
            row |= timed_steps(train.step, case.batch, warm=2, steps=0)
        row["two_steps"] = {"updates_s": clock.seconds, "locking_s": locked.seconds}
        with HostClock() as clock:
            more = timed_steps(train.step, case.batch, warm=0, steps=STEPS)
            train.state_dict()
        laps.end("trained")
        row |= {**more, **{name: row[name] + more[name] for name in ("losses", "times")}}
        row |= {**clock.told(STEPS), "one_pass": matches_torch()}
        row["where"] = spent(lambda: train.step(case.batch))
        laps.end("profiled")
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:600]
    row |= peaks()
    if train is not None:
        # The next plan is rehearsed with a copy of the first model, which may be this one.
        train._strategy.leave()
        case.model.cpu()
    train = case.model = None
    cap_to(None)
    clear()
    return row


def mix_of(section: Memory) -> str:
    """A letter for each block: where its parameters live and are updated (Resident, on the Host,
    Streamed to and from it, its state Visiting the device), and behind it what becomes of its
    activations (kept, offloaded, again; capital: from a checkpoint there)."""
    homes = {("resident", "device"): "R", ("resident", "host"): "H",
             ("streamed", "host"): "S", ("streamed", "device"): "V"}  # fmt: skip
    letters = []
    for block in section.blocks:
        way = block.activations.replace("recomputed", "again")[0]
        is_away = block.activations == "recomputed" and block.checkpoint == "offloaded"
        letters.append(homes[block.parameters, block.update] + (way.upper() if is_away else way))
    return " ".join(letters)


def predicted_busy_s(frontier: Frontier, section: Memory) -> dict[str, float]:
    """Seconds in which each resource works, and bytes that cross the link, as they are planned."""
    plan = next((p for p in frontier.plans
                 if p.memory is not None and p.memory.blocks == section.blocks), None)  # fmt: skip
    if plan is None:
        return {}
    graph, op_s = plan.step.rewritten.graph, plan.step.problem.costs.op_s[0]
    streams = (Stream.COMPUTE, Stream.COPY_IN, Stream.COPY_OUT, Stream.HOST)
    busy = {
        f"{stream.name.lower()}_s": float(op_s[graph.op_stream == stream].sum())
        for stream in streams
    }
    out, back = moved_bytes(plan.step.rewritten)
    return {**busy, "to_host_gb": out / 1e9, "to_device_gb": back / 1e9}


def fsdp(run: Run) -> None:
    """The large model by FSDP2 under the first cap, in as few micro-batches as it has room for."""
    for micro in dict.fromkeys((min(2, run.micro), min(4, run.micro))):
        row = measured(fsdp_offload, run.gpt("cpu"), word_batch(run.sizes), micro=micro,
                       cap=run.caps[0], warm=1, steps=1)  # fmt: skip
        row = {"layers": run.layers, "width": run.width, "system": "FSDP2 offload", **row}
        if not is_out_of_memory(run.book.add("large", row)):
            break


def deepest(run: Run, system: str, cap: int) -> None:
    """The deepest model that a system trains under a cap: from a guess up or down."""
    torch.set_num_threads(2)  # Others run beside it.
    width, depth = run.baseline_width, run.starts[cap]
    fits: dict[int, bool] = {}
    while depth > 0 and depth not in fits:
        build = lambda: gpt(width, depth, run.sizes, DEVICE)  # noqa: B023, E731
        row = measured(HOLD_ALL[system], build, word_batch(run.sizes), micro=run.micro, cap=cap,
                       steps=0)  # fmt: skip
        run.book.add("deepest", {"system": system, "layers": depth, "width": width, **row})
        if "error" in row and not is_out_of_memory(row):
            break
        fits[depth] = "error" not in row
        if DEVICE == "cpu":
            break  # Nothing is capped here.
        depth += 1 if fits[depth] else -1


def pairs(run: Run, name: str) -> None:
    """Five budgets of a model: kept, and as predicted."""
    width, layers, sizes = run.small
    few_words = replace(sizes, vocabulary=min(2048, sizes.vocabulary))
    words = lambda: word_batch(sizes)  # noqa: E731
    rows, side, length = min(8, run.replays.rows), min(56, run.replays.image), sizes.sequence // 8
    images = lambda: (  # noqa: E731
        torch.randn(rows, 3, side, side, device=DEVICE),
        torch.randint(1000, (rows,), device=DEVICE),
    )  # fmt: skip
    sounds = lambda: (  # noqa: E731
        torch.randn(4 * rows, length, 2 * width, device=DEVICE),
        torch.randint(29, (4 * rows, length), device=DEVICE),
    )  # fmt: skip
    models: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
        "gpt": lambda: (gpt(width, layers, sizes, "cpu"), words(), forward),
        "wide gpt": lambda: (gpt(2 * width, 2, sizes, "cpu"), words(), forward),
        "experts": lambda: (
            gpt(width, 3, sizes, "cpu", num_experts=4, hidden=width), words(), forward,
        ),
        # A layer's experts are more than all else, so that small budgets have them come in groups.
        "expert groups": lambda: (
            gpt(width, 3, few_words, "cpu", num_experts=16, hidden=4 * width, batched=True),
            word_batch(few_words), forward,
        ),
        "resnet": lambda: (
            drawn(DeepResNet(81, side, run.replays.channels), "cpu"), images(), plain_forward,
        ),
        "recurrent": lambda: (drawn(Listener(2 * width), "cpu"), sounds(), plain_forward),
        "u-net": lambda: (u_net()[0], (images()[0],), plain_forward),
    }  # fmt: skip
    case = Case(*models[name](), on="auto", device=torch.device(DEVICE))
    for budget in case.budgets(5):
        clear()
        kept = case.chosen(budget)
        with run.book.alone():
            counted, losses = case.counted(kept), case.losses
            clear()
            why = case.explained(kept)
        row = {"budget": budget, "predicted": kept.peak_bytes, "counted": counted, **why}
        run.book.add("pair", {"model": name, **row, "predicted_step_s": kept.step_s,
                              "step_s": case.step_s, "kept": counted <= budget,
                              "losses": losses})  # fmt: skip


def replay(run: Run, name: str) -> None:
    """A model of those published runs (`Replays`) in float32 under a cap, and without one."""
    sizes = run.replays
    images = lambda rows: (  # noqa: E731
        torch.randn(rows, 3, sizes.image, sizes.image, device=DEVICE),
        torch.randint(1000, (rows,), device=DEVICE),
    )
    sound = lambda: (  # noqa: E731
        torch.randn(sizes.rows, sizes.length, sizes.hidden, device=DEVICE),
        torch.randint(29, (sizes.rows, sizes.length), device=DEVICE),
    )
    deep = lambda home: drawn(DeepResNet(sizes.depth, sizes.image, sizes.channels), home)  # noqa: E731
    experts = {"num_experts": sizes.experts, "hidden": 4 * sizes.width}
    cases: dict[str, tuple[str, Callable[[str], Any], Callable[[], Any]]] = {
        "resnet batch 16": (f"{sizes.depth} layers", deep, lambda: images(16)),
        "resnet batch 32": (f"{sizes.depth} layers", deep, lambda: images(32)),
        "rnn": (
            f"{sizes.length} steps, batch {sizes.rows}",
            lambda home: drawn(LongRnn(sizes.length, sizes.hidden), home), sound,
        ),
        "experts": (
            f"12 x {sizes.experts} experts",
            lambda home: gpt(sizes.width, 12, run.sizes, home, **experts),
            lambda: word_batch(run.sizes),
        ),
    }  # fmt: skip
    size, build, make_batch = cases[name]
    batch, told = make_batch(), {"model": name, "size": size}
    # Under the cap, too: that eager fails there is the point.
    for cap in (None, sizes.cap):
        row = measured(lambda *a: plain(*a, loss_of=plain_forward), lambda: build(DEVICE), batch,
                       cap=cap, steps=0 if cap else 3, explain=not cap,
                       alone=run.book.alone)  # fmt: skip
        run.book.add("replay", {**told, "system": "eager", **row})
    under_budget(run, "replay", told, lambda: build("cpu"), batch, sizes.cap, plain_forward,
                 warm=NUM_CALLED + 1, steps=3, explain=True)  # fmt: skip


def largest(run: Run) -> None:
    """The largest model that the host has room for."""
    layers, cap = run.largest
    told = {"layers": layers, "width": run.width}
    batch = word_batch(run.sizes)
    under_budget(run, "large", told, run.gpt("cpu", layers), batch, cap, forward)


def under_budget(run: Run, name: str, told: dict[str, Any], build: Any, batch: Any, cap: int,
                 loss_of: Any, **timing: Any) -> None:  # fmt: skip
    """``hocket.prepare`` with a budget a little below the cap."""
    for part in RESERVES:
        notes: dict[str, Any] = {"budget_gib": cap * (1 - part) / GIB}
        make = ours(int(cap * (1 - part)), notes, loss_of)
        row = measured(make, build, batch, cap=cap, alone=run.book.alone,
                       **{"steps": 2, **timing})  # fmt: skip
        row = {**told, "system": "hocket", **row, **notes}
        if not is_out_of_memory(run.book.add(name, row)):
            break
