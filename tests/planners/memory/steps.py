"""Training steps of chains for tests: layers of four ops, their gradients and their updates."""

from dataclasses import replace

import numpy as np

from hocket.graph import GraphBuilder, Phase, Role
from hocket.plan.make import make_problem
from hocket.planners.candidates import empty_plan

MIB = 2**20


def chain_step(
    num_layers=5,
    activation=8 * MIB,
    weight=4 * MIB,
    flops=2e11,
    logits=0,
    ops_per_layer=4,
    num_updated=None,
    has_probes=False,
):
    """A step of layers ``net.0``, ``net.1``, …: each saves its input and its inner activation, and
    the first ``num_updated`` of them, if not all, are updated. Small ops of another module may come
    between layers: probes."""
    b = GraphBuilder(f"chain {num_layers}")
    at = b.tensor("batch", activation // 8, role=Role.INPUT)
    weights = [b.tensor(f"w{n}", weight, role=Role.PARAMETER) for n in range(num_layers)]
    states = [b.tensor(f"m{n}", 2 * weight, role=Role.OPTIMIZER_STATE) for n in range(num_layers)]
    saved, forward = [], []

    def op(name, reads, size, module, *, role=Role.ACTIVATION, **more):
        number = b.op(name, "aten.mm", reads=reads, flops=flops, bytes_touched=3 * size,
                      module=module, **more)  # fmt: skip
        return number, b.tensor(f"{name}.out", size, producer=number, role=role)

    for n in range(num_layers):
        inner, inputs = [at], []
        for k in range(ops_per_layer):
            reads = [inner[-1], weights[n]] if k == 0 else [inner[-1]]
            number, out = op(f"f{n}.{k}", reads, activation, f"net.{n}.part")
            forward.append(number)
            inputs.append(inner[-1])
            inner.append(out)
        saved.append(inputs)
        at = inner[-1]
        if has_probes:
            op(f"probe{n}", [at], 4, "probe")
    head, scores = op("head", [at], logits or activation, "head")
    last, loss = op("loss", [scores], 4, "head", role=Role.OUTPUT)
    _, grad = op(
        "loss.b", [loss, scores], logits or activation, "head", phase=Phase.BACKWARD, partner=last
    )
    _, grad = op("head.b", [grad, at], activation, "head", phase=Phase.BACKWARD, partner=head)
    updates = []
    for n in reversed(range(num_layers)):
        for k in reversed(range(ops_per_layer)):
            reads = [grad, saved[n][k]] + ([weights[n]] if k == 0 else [])
            partner = forward[n * ops_per_layer + k]
            number, grad_in = op(
                f"b{n}.{k}", reads, activation, f"net.{n}.part", phase=Phase.BACKWARD,
                partner=partner,
            )  # fmt: skip
            if k == 0:
                updates.append((n, b.tensor(f"g{n}", weight, producer=number, role=Role.GRADIENT)))
            grad = grad_in
    for n, gradient in sorted(updates)[:num_updated]:
        _update(b, n, weight, [weights[n], gradient, states[n]])
    return b.build()


def _update(b, n, weight, reads):
    number = b.op(
        f"u{n}", "optimizer.adamw", reads=reads, phase=Phase.OPTIMIZER, bytes_touched=7 * weight,
        module=f"net.{n}",
    )  # fmt: skip
    b.tensor(f"w{n}.new", weight, producer=number, role=Role.PARAMETER, alias_of=reads[0])


def placed(graph, on="1xh200", link_bps=None, host_update_bps=None):
    """The graph as a problem on one device, and the plan that places it there; with other rates of
    the way to the host and of its updates where these are given."""
    problem = make_problem(graph, on)
    if link_bps is not None:
        links = tuple(replace(link, bandwidth_bps=link_bps) for link in problem.cluster.links)
        cluster = replace(problem.cluster, links=links, host_update_bps=host_update_bps)
        problem = make_problem(graph, cluster)
    plan = empty_plan(problem, "one-device").placing(np.zeros(graph.num_ops, dtype=np.int32))
    return problem, plan
