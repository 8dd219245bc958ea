"""Trainings to divide, a quick search, and what is told of its candidates."""

from dataclasses import replace

from hocket.cost.parallel.softwares import find_software
from hocket.hardware import cluster_from_text
from hocket.plan.problem import Problem
from hocket.plan.training import TransformerTraining
from hocket.planners.parallel.forecast import forecast_of
from hocket.planners.parallel.recheck import RecheckEffort
from hocket.planners.parallel.search_limits import fixed_limits
from hocket.planners.parallel.transformer_search import default_limits
from hocket.transformer import Transformer
from hocket.transformer.files import find_model

SMALL = Transformer(
    name="small", hidden=2048, layers=12, heads=16, kv_heads=16, head_width=128, mlp_width=8192,
    mlp="gelu", vocabulary=51200, sequence=2048, tied_embeddings=True, learned_positions=True,
    biases=True, dropout=True,
)  # fmt: skip
QUICK = RecheckEffort(num_simulated=30, num_balanced=4, num_balanced_chunks=1)


def training(model=SMALL, on="8xa100-80g", batch=16, software="megatron-core", dtype=None):
    program = find_software(software)
    work = TransformerTraining(
        model=model if isinstance(model, Transformer) else find_model(model),
        global_batch=batch,
        software=program if dtype is None else replace(program, dtype=dtype),
    )
    return Problem(work=work, cluster=cluster_from_text(on))


def outlooks(comparison):
    """What is told of every candidate, and of the winner first of all."""
    return [forecast_of(comparison.problem, candidate) for candidate in comparison.candidates]


def winning(comparison):
    return forecast_of(comparison.problem, comparison.winner)


def fixing(problem, text):
    """The problem with fields of its configs fixed, such as ``tensor=8``."""
    return replace(problem, limits=fixed_limits(default_limits(problem), text))
