"""What each block of a step takes: seconds, bytes that it leaves behind, bytes that it works in.

Out of the costs of the problem and a walk over the step's storages. For what a block leaves behind
there are four ways (`WAYS`) and for its parameters four homes (`HOMES`), each with the bytes that
stay, the bytes that cross the way to the host, and the seconds that it adds; the linear program
chooses among them. O(ops + reads).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray
from hocket.graph.graph import Graph, Phase
from hocket.hardware.host_route import HostRoute, host_route
from hocket.plan.problem import Problem
from hocket.plan.sections.memory import SMALLEST_MOVED
from hocket.planners.memory.work import find_work, needed_last
from hocket.simulate.rewriting.experts import all_in_groups
from hocket.simulate.rewriting.homes import num_parts, visiting_pieces
from hocket.simulate.rewriting.needs import NUM_LINGERING
from hocket.simulate.rewriting.updates import Update
from hocket.simulate.rewriting.uses import Uses

WAYS = ("kept", "offloaded", "recomputed", "recomputed from the host")
"""What becomes of activations."""
KEPT, OFFLOADED, RECOMPUTED, FROM_HOST = range(len(WAYS))
HOMES = ("resident", "updated on the host", "streamed", "streamed with its state")
"""Of parameters; the last are updated on the device, to which their state comes."""
RESIDENT, HOST_UPDATE, STREAMED, VISITING = range(len(HOMES))


@dataclass(frozen=True, eq=False)
class BlockNumbers:
    """Per block, in the order of the forward pass; sizes in bytes, times in seconds."""

    forward_s: FloatArray
    backward_s: FloatArray
    forward_work: FloatArray
    """Most bytes that its forward pass holds besides what other blocks left behind."""
    backward_work: FloatArray
    """The same of its backward pass, with all that it saved present."""
    stay: FloatArray
    """[block, way]: bytes that stay on the device until the backward pass."""
    moved: FloatArray
    """[block, way]: bytes that go to the host and come back."""
    again_s: FloatArray
    """[block, way]: seconds of ops that run again."""
    home: FloatArray
    """[block, home]: bytes of parameters and optimizer state on the device at all times."""
    fetched: FloatArray
    """[block, home]: bytes of parameters that come for the backward pass."""
    room: FloatArray
    """[block, home]: bytes of these that are on the device at a time."""
    visiting: FloatArray
    """[block, home]: bytes of state and of parameters in full that come for the update."""
    gradients: FloatArray
    """[block, home]: bytes of gradients, or of what was updated, that go to the host."""
    last_piece: FloatArray
    """[block, home]: of these, what goes last of state that comes and goes in pieces."""
    leaving: FloatArray
    """[block, home]: bytes of gradients on the device until they were sent or used."""
    brought: FloatArray
    """[block, home]: bytes of parameters that come for the forward pass: those, and what the host
    has changed of those that stay."""
    update_s: FloatArray
    """[block, home]: seconds of updates on the device."""
    host_traffic: FloatArray
    """[block, home]: bytes that updates on the host read and write."""
    berths_bytes: float
    """Room on the device for state that comes for updates, wherever any does."""
    base_bytes: float
    """What is on the device in any case: batch, buffers, parameters that are nobody's."""
    tail_s: FloatArray
    """Seconds of each op of the last block."""
    tail_again_s: float
    """Seconds of ops that run twice where the loss is made in chunks."""
    tail_held: FloatArray
    """Bytes held while each op of the last block runs, as in its work."""
    tail_inner: FloatArray
    """Of these: bytes that exist for one chunk at a time where the loss is made in chunks."""
    launch_s: float
    link: HostRoute
    host_update_bps: float
    """Bytes that updates on the host read and write per second."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.forward_s)


def measure(
    problem: Problem, uses: Uses, device: int = 0, *, expert_groups: int = 1
) -> BlockNumbers:
    """The numbers of a step that runs on one device, streamed experts in about so many groups."""
    graph = uses.graph
    op_s = problem.costs.op_s[problem.costs.device_row[device]]
    is_forward = graph.op_phase == Phase.FORWARD
    is_backward = graph.op_phase == Phase.BACKWARD
    groups = all_in_groups(uses.experts, expert_groups)
    ways = _ways(uses, op_s, groups)
    homes = _homes(uses, op_s, groups)
    work = find_work(uses, groups)
    return BlockNumbers(
        forward_s=_by_block(uses, is_forward, op_s),
        backward_s=_by_block(uses, is_backward, op_s),
        forward_work=work.forward,
        backward_work=work.backward,
        tail_s=op_s[work.tail],
        tail_again_s=float(op_s[list(work.chunked)].sum()),
        tail_held=work.held[work.tail],
        tail_inner=work.inner[work.tail],
        launch_s=problem.cluster.devices[device].kind.launch_s,
        host_update_bps=problem.cluster.host_update_bps,
        berths_bytes=homes.berths_bytes,
        base_bytes=_base_bytes(graph, homes.owned),
        link=host_route(problem.cluster, problem.cluster.devices[device]),
        stay=ways.stay,
        moved=ways.moved,
        again_s=ways.again_s,
        home=homes.home,
        fetched=homes.fetched,
        room=homes.room,
        last_piece=homes.last_piece,
        leaving=homes.leaving,
        visiting=homes.visiting,
        gradients=homes.gradients,
        brought=homes.brought,
        update_s=homes.update_s,
        host_traffic=homes.host_traffic,
    )


def _by_block(uses: Uses, chosen: BoolArray, values: FloatArray) -> FloatArray:
    sums = np.zeros(uses.blocks.num_blocks)
    np.add.at(sums, uses.blocks.block_of[chosen], values[chosen])
    return sums


# ── what a block leaves behind ───────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class _Ways:
    stay: FloatArray
    moved: FloatArray
    again_s: FloatArray


def _ways(uses: Uses, op_s: FloatArray, groups: Mapping[int, int]) -> _Ways:
    graph, count = uses.graph, uses.blocks.num_blocks
    stay, moved, again_s = (np.zeros((count, len(WAYS))) for _ in range(3))
    last = needed_last(uses, groups)
    for block in range(count):
        own = {s for s in uses.needed[block] if last.get(s) == block}
        stay[block] = _bytes(graph, own)
        moved[block, OFFLOADED] = _bytes(graph, own & _movable(uses, block))
        stay[block, OFFLOADED] -= moved[block, OFFLOADED]
        again = [op for visit in uses.visits_of[block] for op in uses.again[visit]]
        if not again:
            # It cannot be made again: these ways are as keeping it.
            continue
        taken, kept = _without(uses, block)
        here = {s for s in taken | kept if last.get(s, block) <= block}
        again_s[block, RECOMPUTED] = again_s[block, FROM_HOST] = op_s[again].sum()
        stay[block, RECOMPUTED] = _bytes(graph, here)
        moved[block, FROM_HOST] = _bytes(graph, here - kept)
        stay[block, FROM_HOST] = stay[block, RECOMPUTED] - moved[block, FROM_HOST]
    return _Ways(stay, moved, again_s)


def _bytes(graph: Graph, storages: Iterable[int]) -> float:
    return float(graph.tensor_bytes[list(storages)].sum())


def _movable(uses: Uses, block: int) -> set[int]:
    """Storages of a block that can go to the host: those that its visits save."""
    there = range(len(uses.visits) - NUM_LINGERING)
    saved = {s for visit in uses.visits_of[block] if visit in there for s in uses.saved(visit)}
    large = {s for s in saved if uses.graph.tensor_bytes[s] >= SMALLEST_MOVED}
    return large - uses.outside[block]


def _without(uses: Uses, block: int) -> tuple[set[int], set[int]]:
    """What a block needs where its visits run again: what these take, and what is kept besides."""
    taken: set[int] = set()
    kept = set(uses.outside[block])
    for visit in uses.visits_of[block]:
        is_made = bool(uses.again[visit])
        (taken if is_made else kept).update(uses.taken[visit] if is_made else uses.saved(visit))
    return taken, kept


# ── parameters ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class _Homes:
    home: FloatArray
    fetched: FloatArray
    room: FloatArray
    visiting: FloatArray
    gradients: FloatArray
    last_piece: FloatArray
    leaving: FloatArray
    brought: FloatArray
    update_s: FloatArray
    host_traffic: FloatArray
    owned: frozenset[int]
    berths_bytes: float


def _homes(uses: Uses, op_s: FloatArray, groups: Mapping[int, int]) -> _Homes:
    """What the parameters of each block take; those of several blocks stay on the device here."""
    graph, count = uses.graph, uses.blocks.num_blocks
    tables = {
        name: np.zeros((count, len(HOMES)))
        for name in (
            "home",
            "fetched",
            "room",
            "visiting",
            "gradients",
            "last_piece",
            "leaving",
            "brought",
            "update_s",
            "host_traffic",
        )
    }
    copied, readers = uses.copied_bytes, uses.readers
    owned: set[int] = set()
    for root, of in readers.items():
        block, size = min(of), float(graph.tensor_bytes[root])
        owned.add(root)
        tables["home"][block] += size
        if root not in uses.shared:
            away = (STREAMED, VISITING)
            tables["home"][block, away] -= size
            tables["fetched"][block, away] += copied[root]
            tables["brought"][block, away] += copied[root]
            tables["room"][block, away] += copied[root] / groups.get(root, 1)
    visiting: dict[int, list[Update]] = defaultdict(list)
    for update in uses.updates.values():
        block = update.block
        owned.update(update.state)
        tables["home"][block, RESIDENT] += update.state_bytes
        is_shared = any(root in uses.shared for root in update.roots)
        # What several blocks read stays, and the host updates it.
        at_home = (HOST_UPDATE, STREAMED, VISITING) if is_shared else (HOST_UPDATE, STREAMED)
        is_grouped = any(root in groups for root in update.roots)
        sent_bytes = update.gradient_bytes if is_grouped else update.sent_bytes
        tables["gradients"][block, at_home] += sent_bytes
        at_once = max((groups.get(root, 1) for root in update.roots), default=1)
        tables["leaving"][block, at_home] += update.gradient_bytes / at_once
        tables["host_traffic"][block, at_home] += update.host_bytes
        back = at_home if is_shared else (HOST_UPDATE,)
        tables["brought"][block, back] += copied[list(update.parameters)].sum()
        tables["update_s"][block, RESIDENT] += op_s[update.op]
        if is_shared:
            continue
        visiting[block].append(update)
        tables["visiting"][block, VISITING] += update.state_bytes + update.parameter_bytes
        tables["gradients"][block, VISITING] += update.state_bytes + update.leaving_bytes
        tables["leaving"][block, VISITING] += update.gradient_bytes
    pieces, berths_bytes = visiting_pieces(visiting)
    for block, of_block in pieces.items():
        parts = sum(num_parts([uses.updates[op] for op in ops]) for ops in of_block)
        tables["last_piece"][block, VISITING] = tables["gradients"][block, VISITING] / parts
    return _Homes(**tables, owned=frozenset(owned), berths_bytes=float(berths_bytes))


def _base_bytes(graph: Graph, owned: frozenset[int]) -> float:
    there = (graph.tensor_producer < 0) & (graph.alias_of < 0)
    there[list(owned)] = False
    return float(graph.tensor_bytes[there].sum())
