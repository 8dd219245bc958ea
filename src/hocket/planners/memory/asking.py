"""What the host takes to ask for a step within a budget: no step is shorter.

Ops that run again are asked for again. Beside ops there is what the executor does in Python for
each tensor that is computed again, each storage that goes and comes, and each parameter that is at
home on the host (`hocket.cost.host`). O(ops), numpy.
"""

from __future__ import annotations

from hocket.cost.host import AT_HOME, COMPUTED_AGAIN, MOVED
from hocket.cost.roofline import work_on
from hocket.graph.graph import Stream
from hocket.plan.problem import Problem
from hocket.plan.sections import Memory
from hocket.simulate.rewriting.rewrite import Rewritten
from hocket.simulate.rewriting.uses import Uses


class Asking:
    """The host's time for steps of one problem on one of its devices."""

    def __init__(self, problem: Problem, uses: Uses, device: int) -> None:
        self._uses = uses
        kind = problem.cluster.devices[device].kind
        self._work = work_on(problem.graph, kind, problem.costs.settings)

    def seconds(self, memory: Memory, done: Rewritten) -> float:
        """Of a section that was carried into the graph."""
        if not self._work.mean_host_s:
            return 0.0
        stream = done.graph.op_stream
        is_asked = (done.origin >= 0) & (stream != Stream.HOST)
        asked_s = float(self._work.host_s[done.origin[is_asked]].sum())
        uses, policies = self._uses, memory.blocks
        again = sum(
            len(reads)
            for visit, reads in zip(uses.visits.visits, uses.backward_reads, strict=True)
            if policies[visit.block].activations == "recomputed"
        )
        moved = int(done.is_offload.sum())
        at_home = sum(
            len(update.roots)
            for update in uses.updates.values()
            if policies[update.block].is_at_home
        )
        others = COMPUTED_AGAIN * again + MOVED * moved + AT_HOME * at_home
        return asked_s + self._work.mean_host_s * others
