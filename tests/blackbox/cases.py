"""Commands whose answers are pinned in `golden/`, and the keys that are pinned of each answer.

`python tests/blackbox/regenerate.py` writes the files anew and lists what changed; the commit that
does so says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from blackbox.command import hocket

GOLDEN = Path(__file__).parent / "golden"
PUBLIC = Path(__file__).parents[3] / "shared" / "data"
"""Public traces and graphs, where they are at hand."""


class Case(NamedTuple):
    """A command and what is pinned of its answer; paths below ``PUBLIC`` may be absent."""

    arguments: Sequence[object]
    pick: Callable[[Any], dict[str, Any]]
    needs: Path | None = None

    def answer(self, folder: Path) -> dict[str, Any]:
        """Run the command in the folder of graphs and traces."""
        ended = hocket(*self.arguments, "--json", cwd=folder)
        is_answer = ended.stdout and ended.data.keys() - {"error"}
        return {"code": ended.code, **(self.pick(ended.data) if is_answer else {})}


def write_inputs(folder: Path) -> None:
    """Graphs and traces that cases read."""
    for family in ("chain", "series-parallel", "transformer", "layered"):
        made = hocket("generate", family, "--ops", 120, "--seed", 1, "-o", f"{family}.json.gz",
                      cwd=folder)  # fmt: skip
        assert made.code == 0, made.stderr
    rows = [f"job{i},x,{37 * i % 900},{1 + i % 3},{200 + 613 * i % 4000}" for i in range(24)]
    (folder / "trace.csv").write_text("name,job_type,arrival_s,gang,duration_s\n" + "\n".join(rows))


def _taken(*names: str) -> Callable[[Any], dict[str, Any]]:
    return lambda data: {name: data.get(name) for name in names}


def _fleet(data: Any) -> dict[str, Any]:
    names = ("average_jct_s", "p99_jct_s", "makespan_s", "num_preemptions")
    runs = data.get("runs", [data])
    return {run["policy"]: {name: run[name] for name in names} for run in runs}


def _parallel(data: Any) -> dict[str, Any]:
    names = ("tensor", "pipeline", "data", "microbatch", "schedule", "recompute", "zero", "step_s",
             "peak_bytes", "mfu")  # fmt: skip
    return {name: data["chosen"][name] for name in names}


def _waves(data: Any) -> dict[str, Any]:
    steps = {way["name"]: [way["step_s"], way["peak_bytes"]] for way in data["candidates"]}
    return {"pays": data["pays"], "gain": data["gain"], "ways": steps}


_PLAN = _taken("chosen", "step_s", "peak_bytes", "lower_bound_s")
_FIT = _taken("chosen", "step_s", "peak_bytes", "smallest_budget_bytes", "lower_bound_s")
# The number of trees is left out: a packing of the same rate differs between CPUs by rounding.
_LINKS = _taken("algorithm", "rate", "bound", "latency_s", "time_s")


def _model(name: str) -> str:
    return f"blackbox.tiny_models:{name}"


def _plans() -> Iterator[tuple[str, Case]]:
    for family in ("chain", "series-parallel", "transformer", "layered"):
        for cluster in ("2xt4", "mixed-desktop"):
            yield (
                f"{family} on {cluster}",
                Case(("plan", f"{family}.json.gz", "--on", cluster), _PLAN),
            )
    for planner in ("m-topo", "m-etf", "m-sct", "pardnn", "m-etf+local-search"):
        yield (
            f"transformer by {planner}",
            Case(
                ("plan", "transformer.json.gz", "--on", "4xv100-16g", "--planner", planner), _PLAN
            ),
        )
    yield (
        "layered for throughput",
        Case(
            ("plan", "layered.json.gz", "--on", "2xt4", "--objective", "throughput"),
            _taken("chosen", "max_load", "lower_bound_s"),
        ),
    )
    for model, cluster, *more in (
        ("mlp", "2xt4"),
        ("branches", "1xrtx3090+1xt4"),
        ("language", "2xt4"),
        ("deep_language", "4xv100-16g", "--must", "pipeline 2"),
        ("deep_mlp", "2xcpu-core", "--must", "data 2"),
        ("gpt2", "2xt4", "--must", "tensor 2"),
        ("convolutions", "2xt4", "--objective", "cost"),
    ):
        yield (
            " ".join((model, "on", cluster, *more)),
            Case(("plan", _model(model), "--on", cluster, *more), _PLAN),
        )


def _fits() -> Iterator[tuple[str, Case]]:
    for model, memory in (("deep_mlp", "200KiB"), ("deep_mlp", "100KiB"), ("language", "100KiB"),
                          ("residual", "10B")):  # fmt: skip
        yield (
            f"{model} in {memory}",
            Case(("fit", _model(model), "--on", "1xt4", "--memory", memory), _FIT),
        )
    yield "waves of mlp", Case(("waves", _model("deep_mlp"), "--on", "1xt4"), _waves)


def _searches() -> Iterator[tuple[str, Case]]:
    for model, cluster, batch, program, *more in (
        ("llama3-8b", "2xdgx-h100", 512, "megatron-core"),
        (
            "gpt3-175b",
            "128xdgx-a100-80g",
            1536,
            "megatron-core",
            "--fix",
            "tensor=8,recompute=full",
        ),
        ("gpt-1.7b", "4xdgx1-v100", 512, "megatron-core"),
        ("mixtral-8x7b", "4xdgx-h100", 256, "torchtitan"),
    ):
        asked = ("parallel", model, "--on", cluster, "--batch", batch, "--software", program)
        yield f"{model} on {cluster}", Case((*asked, *more), _parallel)


def _fleets() -> Iterator[tuple[str, Case]]:
    names = ("las", "fifo", "shortest-job-first", "finish-time-fairness", "makespan")
    policies = [word for name in names for word in ("--policy", name)]
    yield (
        "24 jobs",
        Case(("fleet", "simulate", "trace.csv", "--cluster", "v100:4,k80:4", *policies), _fleet),
    )
    gavel = PUBLIC / "cluster" / "gavel_generated" / "gavel_continuous_single_rate5.6_seed0.tsv"
    table = PUBLIC / "cluster" / "gavel" / "simulation_throughputs.json"
    yield "gavel, 200 jobs", Case(
        ("fleet", "simulate", gavel, "--throughputs", table, "--cluster",
         "v100:36,p100:36,k80:36", "--jobs", "0:200", "--policy", "las"), _fleet, gavel,
    )  # fmt: skip


def _collectives() -> Iterator[tuple[str, Case]]:
    for kind, cluster, *more in (
        ("allreduce", "dgx1-v100"),
        ("allreduce", "dgx1-v100", "--gpus", "1,4,5,6"),
        ("allreduce", "dgx1-v100", "--gpus", "0,1,2", "--size", "64MiB"),
        ("broadcast", "dgx1-v100", "--root", "gpu0"),
        ("allgather", "dgx1-v100", "--gpus", "0-3"),
        ("reducescatter", "2xdgx-a100-80g", "--bound"),
        ("allreduce", "mixed-desktop"),
    ):
        yield (
            " ".join((kind, "on", cluster, *more)),
            Case(("collective", kind, "--on", cluster, *more), _LINKS),
        )


AREAS: dict[str, dict[str, Case]] = {
    "plan": dict(_plans()),
    "fit": dict(_fits()),
    "parallel": dict(_searches()),
    "fleet": dict(_fleets()),
    "collective": dict(_collectives()),
}
"""Cases by golden file."""


def golden(area: str) -> dict[str, Any]:
    """Pinned answers of an area; none where the file is not there yet."""
    path = GOLDEN / f"{area}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def write_golden(area: str, answers: dict[str, Any]) -> None:
    """Pin answers; they are sorted, so that a difference shows what changed."""
    GOLDEN.mkdir(exist_ok=True)
    text = json.dumps(answers, indent=1, sort_keys=True)
    (GOLDEN / f"{area}.json").write_text(text + "\n")


def flat(answer: Any, path: str = "") -> dict[str, Any]:
    """Leaves of an answer by their path."""
    if isinstance(answer, dict):
        parts = answer.items()
    elif isinstance(answer, list):
        parts = enumerate(answer)
    else:
        return {path: answer}
    return {k: v for name, part in parts for k, v in flat(part, f"{path}/{name}").items()}


def same(one: Any, other: Any) -> bool:
    """Equal, or numbers that differ by rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-6 * max(abs(one), abs(other))
    return bool(one == other)


def changes(old: Any, new: Any) -> list[str]:
    """Lines such as ``/step_s: 1.5 -> 1.4``."""
    before, after = flat(old), flat(new)
    return [
        f"{path}: {before.get(path)} -> {after.get(path)}"
        for path in sorted(before.keys() | after.keys())
        if not same(before.get(path), after.get(path))
    ]
