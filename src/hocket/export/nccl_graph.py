"""Export rings and chains as NCCL's graph XML (``NCCL_GRAPH_FILE``).

NCCL reads an order of GPUs per channel, and closes it to a ring or uses it as a chain. It cannot
run trees with forks, so schedules with forks are refused. Rates are in GB/s per channel.
"""

from __future__ import annotations

from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from hocket.base.errors import UsageError
from hocket.hardware.cluster import Cluster
from hocket.plan.sections.communication import Communication, Tree

_PATTERN_RING, _PATTERN_CHAIN = 4, 1


def to_nccl_graph(section: Communication, cluster: Cluster) -> str:
    """Content of the graph file; raises `UsageError` for schedules whose trees fork."""
    orders: dict[tuple[str, ...], float] = {}
    is_ring = section.algorithm.startswith("ring")
    rate_gbps = float(section.rate_bps(cluster)) / 1e9
    for tree in section.trees:
        order = _order(tree)
        if is_ring:
            # The shares of all roots use the same ring, so they are one channel that begins at the
            # first rank.
            at = order.index(section.ranks[0])
            order = order[at:] + order[:at]
        orders[order] = orders.get(order, 0.0) + float(tree.share) * rate_gbps
    number = {rank: index for index, rank in enumerate(section.ranks)}
    top = Element("graphs", {"version": "1"})
    graph = ElementTree.SubElement(top, "graph", {
        "id": "0" if is_ring else "1",
        "pattern": str(_PATTERN_RING if is_ring else _PATTERN_CHAIN), "crossnic": "0",
        "nchannels": str(len(orders)), "speedintra": f"{min(orders.values()):.6g}",
        "speedinter": f"{min(orders.values()):.6g}", "typeintra": "NVL", "typeinter": "PIX",
        "samechannels": "0",
    })  # fmt: skip
    for order in orders:
        channel = ElementTree.SubElement(graph, "channel")
        for rank in order:
            ElementTree.SubElement(channel, "gpu", {"dev": str(number[rank])})
    ElementTree.indent(top)
    return ElementTree.tostring(top, encoding="unicode") + "\n"


def _order(tree: Tree) -> tuple[str, ...]:
    """Ranks of a tree that is a path, in order from its root; raises `UsageError` for a fork."""
    sends = [(send.src, send.dst) for send in tree.broadcast] or [
        (send.dst, send.src) for send in reversed(tree.reduce)
    ]
    after = dict(sends)
    order = [tree.root]
    while order[-1] in after:
        order.append(after[order[-1]])
    if len(order) != len(sends) + 1:
        raise UsageError(
            "NCCL's graph files hold rings and chains only, and a tree of this schedule forks",
            hint="write MSCCL's XML or MSCCL++'s JSON instead",
        )
    return tuple(order)
