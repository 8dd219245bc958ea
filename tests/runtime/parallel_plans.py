"""Small models, configs and plans for tests of parallel runs."""

from dataclasses import replace

from hocket.cost.parallel.costs import StageCosts
from hocket.cost.parallel.software import Software
from hocket.hardware.shorthand import cluster_from_text
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel
from hocket.plan.training import TransformerTraining
from hocket.plan.transformer_plan import TransformerPlan
from hocket.planners.parallel.schedules import make_schedule
from hocket.transformer import ParallelConfig, Transformer

GPT = Transformer(
    name="toy-gpt", hidden=16, layers=4, heads=4, kv_heads=4, head_width=4, mlp_width=24,
    mlp="gelu", vocabulary=32, sequence=8, tied_embeddings=True, learned_positions=True,
    biases=True, dropout=False,
)  # fmt: skip
LLAMA = replace(
    GPT, name="toy-llama", kv_heads=2, mlp="swiglu", tied_embeddings=False,
    learned_positions=False, biases=False,
)  # fmt: skip


def costs_of(num_stages, num_devices, forward_s=1.0):
    """Equal stages."""
    every = (forward_s,) * num_stages
    return StageCosts(
        forward_s=every, input_gradient_s=every, weight_gradient_s=every,
        send_s=(0.0,) * (num_stages - 1), activation_bytes=(1,) * num_stages,
        weight_gradient_bytes=(1,) * num_stages, state_bytes=(1,) * num_devices,
        after_s=(0.0,) * num_devices,
    )  # fmt: skip


def divided(model, schedule_name, pipeline, microbatches=4, **fields):
    """A model with enough layers, its config and schedule."""
    schedule = make_schedule(schedule_name, pipeline, microbatches)
    config = ParallelConfig(
        pipeline=pipeline, chunks=schedule.num_stages // pipeline, schedule=schedule_name, **fields
    )
    config = replace(config, global_batch=microbatches * config.microbatch * config.data)
    layers = config.layers or (1,) * config.num_stages
    return replace(model, layers=sum(layers)), config, schedule


def plan_of(model, config, schedule, on=None, dtype="bfloat16"):
    """A plan on the first devices of a cluster."""
    cluster = cluster_from_text(on or f"{config.num_devices}xa100-80g")
    names, size = cluster.device_names, config.num_devices // config.pipeline
    devices = tuple(
        tuple(names[rank * size : (rank + 1) * size]) for rank in range(config.pipeline)
    )
    plan = Plan(sections=(Parallel.of_config(config, model, devices), schedule))
    work = TransformerTraining(
        model=model, global_batch=config.global_batch, software=Software(name="", dtype=dtype)
    )
    return TransformerPlan(
        Problem(work=work, cluster=cluster),
        plan.claiming(step_s=1.5, peak_bytes=(10,) * config.pipeline),
    )


def circular_plan():
    """A plan whose ranks wait for each other: the first wants a gradient before it has sent all."""
    model, config, schedule = divided(LLAMA, "1f1b", 2, microbatches=2)
    work, microbatch = schedule.work.copy(), schedule.microbatch.copy()
    work[:4], microbatch[:4] = (0, 1, 0, 1), (0, 0, 1, 1)
    work[4:], microbatch[4:] = (0, 0, 1, 1), (0, 1, 0, 1)
    return plan_of(model, config, replace(schedule, work=work, microbatch=microbatch))
