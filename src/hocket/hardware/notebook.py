"""A Cluster as a small HTML table for notebooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from hocket.base.units import format_bytes, format_rate, format_seconds
from hocket.hardware.cluster import Cluster, DeviceKind, Link

MAX_ROWS = 24


def cluster_html(cluster: Cluster) -> str:
    """Devices by host and kind, then links by their figures; all text escaped."""
    devices = Counter((d.host, d.kind.name, d.memory_bytes) for d in cluster.devices)
    kinds = {kind.name: kind for kind in cluster.kinds}
    device_rows = [
        (str(count), name, host, format_bytes(memory_bytes), _rates(kinds[name]))
        for (host, name, memory_bytes), count in devices.items()
    ]
    links = Counter(_figures(link) for link in cluster.links)
    link_rows = [(str(count), *figures) for figures, count in links.items()]
    return (
        f"<div><b>{escape(cluster.name)}</b>, {cluster.num_devices} devices"
        + _table(("count", "kind", "host", "memory", "peak"), device_rows)
        + (_table(("count", "link", "bandwidth", "latency"), link_rows) if link_rows else "")
        + "</div>"
    )


def _rates(kind: DeviceKind) -> str:
    return ", ".join(
        f"{dtype} {format_rate(rate, 'FLOP/s')}" for dtype, rate in kind.peak_flops.items()
    )


def _figures(link: Link) -> tuple[str, str, str]:
    form = (
        "bus" if link.is_bus else "one way" if link.duplex == "one-way" else f"{link.duplex} duplex"
    )
    return form, format_rate(link.bandwidth_bps, "B/s"), format_seconds(link.latency_s)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    def row(cells: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        body += f'<tr><td colspan="{len(head)}">… and {len(rows) - MAX_ROWS} more rows</td></tr>'
    return f"<table><thead>{row(head, 'th')}</thead><tbody>{body}</tbody></table>"
