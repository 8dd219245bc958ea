"""The communication section: one collective as weighted trees over the links of a cluster.

A tree sends a fraction of the message. Its ``reduce`` sends lead to the root, its ``broadcast``
sends away from the root. All-reduce has both, broadcast and all-gather only the latter, reduce and
reduce-scatter only the former. Rings, chains, stars and packed trees can all be written this way.
`interpret` checks a section independently of its planner by executing the sends one by one on sets
of contributions. `rate_bps` is the exact rate that the links allow for these fractions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, get_args

from hocket.base import fields
from hocket.base.errors import CheckError, InputFileError
from hocket.hardware.cluster import Cluster, Link
from hocket.plan.sections.section import Section
from hocket.plan.violation import Violation

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem

Collective = Literal["broadcast", "reduce", "allgather", "reducescatter", "allreduce"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
MAX_TREES = 100_000
Hop = tuple[str, str, str]
"""Names of a link, of the place where it is entered and of the place where it is left."""


@dataclass(frozen=True)
class Send:
    """Transfer of one rank's data to another rank over the links of a route."""

    src: str
    dst: str
    hops: tuple[Hop, ...]


@dataclass(frozen=True)
class Tree:
    """A fraction of the message and its sends, in an order in which they can be executed."""

    root: str
    share: Fraction
    reduce: tuple[Send, ...] = ()
    broadcast: tuple[Send, ...] = ()


@dataclass(frozen=True)
class Communication(Section):
    """Trees of sends that execute one collective."""

    collective: str
    algorithm: str
    """Algorithm that made it, such as ``packed trees`` or ``ring``; only displayed."""
    ranks: tuple[str, ...]
    """Device of each rank."""
    root: str
    """Root of a broadcast or reduce; the first rank for other collectives."""
    trees: tuple[Tree, ...]
    num_chunks: int = 1
    """Number of chunks in which each tree sends its fraction of the message, one after another."""

    def loads(self, cluster: Cluster) -> dict[tuple[str, str], Fraction]:
        """Return the traffic on each channel, in sizes of the message.

        A bus or half-duplex link is one channel, any other link has one channel per direction.
        """
        links = {link.name: link for link in cluster.links}
        loads: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
        for tree in self.trees:
            for send in (*tree.reduce, *tree.broadcast):
                for link, src, _ in send.hops:
                    loads[channel(links[link], src)] += tree.share
        return dict(loads)

    def rate_bps(self, cluster: Cluster) -> Fraction:
        """Return the message bytes per second while all trees send; the busiest channel limits
        it."""
        links = {link.name: link for link in cluster.links}
        return min(
            # Whole bytes per second keep the rate an exact fraction.
            round(links[name].bandwidth_bps) / load
            for (name, _), load in self.loads(cluster).items()
        )

    def verify(self, problem: Problem, plan: Plan) -> Iterator[Violation]:
        """Yield the first error that `require_legal` finds on the problem's cluster."""
        try:
            self.require_legal(problem.cluster)
        except CheckError as error:
            yield Violation("communication", f"{error.where} {error.message}".strip())

    def require_legal(self, cluster: Cluster) -> None:
        """Raise `CheckError` unless all routes exist and the sends execute the collective."""
        places = {*cluster.device_names, *cluster.hosts, *cluster.switches}
        links = {link.name: link for link in cluster.links}
        if self.collective not in COLLECTIVES:
            raise CheckError(f"unknown collective {self.collective!r}")
        if len(set(self.ranks)) != len(self.ranks) or not places.issuperset(self.ranks):
            raise CheckError("ranks must be different devices of the cluster")
        if self.root not in self.ranks:
            raise CheckError(f"the root {self.root!r} is no rank")
        for number, tree in enumerate(self.trees):
            for send in (*tree.reduce, *tree.broadcast):
                _check_route(send, links, f"trees[{number}]")
        interpret(self)

    def to_data(self) -> dict[str, Any]:
        """The section as plain data."""
        # Sends are listed once and referred to by number, since trees share most of them.
        routes: dict[Send, int] = {}
        for tree in self.trees:
            for send in (*tree.reduce, *tree.broadcast):
                routes.setdefault(send, len(routes))
        return {
            "collective": self.collective,
            "algorithm": self.algorithm,
            "ranks": list(self.ranks),
            "root": self.root,
            "num_chunks": self.num_chunks,
            "ways": [
                {"from": route.src, "to": route.dst, "hops": [list(hop) for hop in route.hops]}
                for route in routes
            ],
            "trees": [
                {
                    "root": tree.root,
                    "share": str(tree.share),
                    "reduce": [routes[send] for send in tree.reduce],
                    "broadcast": [routes[send] for send in tree.broadcast],
                }
                for tree in self.trees
            ],
        }

    @classmethod
    def from_data(cls, data: object, problem: Problem) -> Communication:
        """Read the section from plain data; raises `InputFileError`."""
        keys = ("collective", "algorithm", "ranks", "root", "num_chunks", "ways", "trees")
        top = fields.record(data, "communication", required=keys)
        routes = [
            _route(item, f"ways[{n}]") for n, item in enumerate(fields.items(top["ways"], "ways"))
        ]
        trees = fields.items(top["trees"], "trees")
        if len(trees) > MAX_TREES:
            raise InputFileError(f"trees: more than {MAX_TREES}")
        return cls(
            collective=fields.choice(top["collective"], "collective", COLLECTIVES),
            algorithm=fields.text(top["algorithm"], "algorithm"),
            ranks=tuple(fields.text_column(top["ranks"], "ranks")),
            root=fields.text(top["root"], "root"),
            num_chunks=fields.integer(top["num_chunks"], "num_chunks", 1, 2**31),
            trees=tuple(_tree(item, f"trees[{n}]", routes) for n, item in enumerate(trees)),
        )


def channel(link: Link, src: str) -> tuple[str, str]:
    """Return the channel for which transfers over a link contend.

    That is the link's direction, or the link itself if it is a bus or half-duplex.
    """
    return (link.name, "" if link.is_shared else src)


# ── the interpreter ──────────────────────────────────────────────────────────────────────────────


def interpret(section: Communication) -> None:
    """Execute every send on sets of contributions; raise `CheckError` if the result is wrong."""
    total: dict[str, Fraction] = defaultdict(Fraction)
    for number, tree in enumerate(section.trees):
        where = f"trees[{number}]"
        if tree.share <= 0 or tree.root not in section.ranks:
            raise CheckError("shares are positive and roots are ranks", where=where)
        total[tree.root] += tree.share
        _run(section, tree, where)
    if section.collective in ("broadcast", "reduce") and set(total) != {section.root}:
        raise CheckError(f"all trees of a {section.collective} have its root")
    if section.collective in ("allgather", "reducescatter"):
        if any(total[rank] * len(section.ranks) != 1 for rank in section.ranks):
            raise CheckError("each rank must be the root of an equal share of the message")
    elif sum(total.values()) != 1:
        raise CheckError(f"the shares add up to {sum(total.values())}, not to 1")


def _run(section: Communication, tree: Tree, where: str) -> None:
    """Track, send by send, the ranks whose contributions each rank holds of a tree's fraction."""
    everyone = frozenset(section.ranks)
    reduces = section.collective in ("reduce", "reducescatter", "allreduce")
    held: dict[str, frozenset[str]] = {
        rank: frozenset((rank,)) if reduces or rank == tree.root else frozenset()
        for rank in section.ranks
    }
    if tree.reduce and not reduces:
        raise CheckError(f"a {section.collective} reduces nothing", where=where)
    for send in tree.reduce:
        if held[send.src] & held[send.dst]:
            raise CheckError(
                # The same contribution twice would be counted twice in the sum.
                f"{send.src} adds to {send.dst} what it already has of "
                f"{', '.join(sorted(held[send.src] & held[send.dst]))}",
                where=where,
            )
        held[send.dst] |= held[send.src]
        # A contribution that was passed on must not be sent again, or it would be added twice.
        held[send.src] = frozenset()
    if reduces and held[tree.root] != everyone:
        missing = ", ".join(sorted(everyone - held[tree.root]))
        raise CheckError(f"{tree.root} never gets the part of {missing}", where=where)
    complete = held[tree.root]
    for send in tree.broadcast:
        if held[send.src] != complete:
            raise CheckError(f"{send.src} passes on what it does not have yet", where=where)
        if held[send.dst] == complete:
            raise CheckError(f"{send.dst} gets the same twice", where=where)
        held[send.dst] = complete
    if section.collective in ("broadcast", "allgather", "allreduce"):
        lacking = sorted(rank for rank in section.ranks if held[rank] != complete)
        if lacking:
            raise CheckError(f"{', '.join(lacking)} never get it", where=where)
    # After a reduce, only the root needs the result.
    elif tree.broadcast:
        raise CheckError(f"a {section.collective} broadcasts nothing", where=where)


def _check_route(send: Send, links: Mapping[str, Link], where: str) -> None:
    at = send.src
    for name, src, dst in send.hops:
        link = links.get(name)
        if link is None or src not in link.ends or dst not in link.ends or src == dst:
            raise CheckError(f"no link {name!r} leads from {src!r} to {dst!r}", where=where)
        if src != at:
            raise CheckError(f"the route of {send.src} to {send.dst} breaks at {at!r}", where=where)
        at = dst
    if at != send.dst or not send.hops:
        raise CheckError(f"the route of {send.src} to {send.dst} ends at {at!r}", where=where)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


def _route(item: object, path: str) -> Send:
    data = fields.record(item, path, required=("from", "to", "hops"))
    hops = []
    for number, hop in enumerate(fields.items(data["hops"], f"{path}.hops")):
        texts = fields.text_column(hop, f"{path}.hops[{number}]")
        if len(texts) != 3:
            raise InputFileError(f"{path}.hops[{number}]: must be a link and two places")
        hops.append((texts[0], texts[1], texts[2]))
    src, dst = fields.text(data["from"], f"{path}.from"), fields.text(data["to"], f"{path}.to")
    return Send(src, dst, tuple(hops))


def _tree(item: object, path: str, routes: list[Send]) -> Tree:
    keys = ("root", "share", "reduce", "broadcast")
    data = fields.record(item, path, required=keys)

    def sends(key: str) -> tuple[Send, ...]:
        chosen = fields.int_column(data[key], f"{path}.{key}", 0, len(routes) - 1)
        return tuple(routes[index] for index in chosen.tolist())

    return Tree(
        root=fields.text(data["root"], f"{path}.root"),
        share=_fraction(data["share"], f"{path}.share"),
        reduce=sends("reduce"),
        broadcast=sends("broadcast"),
    )


def _fraction(value: object, path: str) -> Fraction:
    text = fields.text(value, path)
    above, _, below = text.partition("/")
    # The length is limited because parsing huge integers takes quadratic time.
    if len(text) > 2000 or not above.isdecimal() or not (below or "1").isdecimal():
        raise InputFileError(f"{path}: {text[:50]!r} is no fraction", hint="write it like '3/16'")
    if int(below or "1") == 0:
        raise InputFileError(f"{path}: division by 0")
    return Fraction(int(above), int(below or "1"))
