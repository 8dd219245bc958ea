"""Read the links of a hardware file: an entry makes one link, a bus, or one link per pair."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any

from hocket.base.errors import did_you_mean
from hocket.base.fields import shown
from hocket.hardware.cluster import Device, Duplex, Link
from hocket.hardware.kinds import KindEntry, LinkFigures, link_figures
from hocket.hardware.tables import FileTable

MAX_LINKS = 1_000_000
MAX_PATTERNS = 1000

_DUPLEX: Mapping[str, Duplex] = {"full": "full", "half": "half", "one-way": "one-way"}
_KEYS = ("name", "ends", "between", "bandwidth", "latency", "duplex")


def read_links(
    top: FileTable, devices: Sequence[Device], others: Iterable[str], kinds: Mapping[str, KindEntry]
) -> tuple[Link, ...]:
    """All links of a file: those of its entries, then host links of devices without any link."""
    find = _PlaceFinder((*(device.name for device in devices), *others))
    links: list[Link] = []
    names = LinkNames()
    for table in top.tables("links", _KEYS):
        given = table.name("name") if "name" in table.data else None
        if given is not None and "between" in table.data:
            raise table.error("name", "links made by 'between' get their names from their ends")
        figures = link_figures(table)
        duplex = _DUPLEX[table.choice("duplex", tuple(_DUPLEX))]
        for ends in _ends(table, find, MAX_LINKS - len(links)):
            made = _link(ends, names, figures)
            links.append(replace(made, name=given or made.name, duplex=duplex))
    links += _host_links(devices, links, kinds, names, top)
    repeated = next((name for name, n in Counter(x.name for x in links).items() if n > 1), None)
    if repeated is not None:
        raise top.error("links", f"two links have the name {repeated!r}", "names must differ")
    return tuple(links)


class LinkNames:
    """Default names of links: their ends, with a number if an earlier link has the same ends."""

    def __init__(self) -> None:
        self._used: Counter[str] = Counter()

    def next(self, ends: tuple[str, ...]) -> str:
        """Name of the next link between these ends."""
        base = "bus" if len(ends) > 2 else "-".join(ends)
        self._used[base] += 1
        return base if self._used[base] == 1 else f"{base}#{self._used[base]}"


class _PlaceFinder:
    """Find devices, hosts and switches by name or by a pattern such as ``gpu*``.

    Results of patterns are cached, because large files repeat the same few patterns.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._known = set(names)
        self._found: dict[str, tuple[str, ...]] = {}

    def __call__(self, text: Any, table: FileTable, key: str) -> tuple[str, ...]:
        """The places that ``text`` names: one place, or all that match the pattern."""
        if not isinstance(text, str) or len(text) > 128:
            raise table.error(key, f"{shown(text)} is not the name of a place")
        if text in self._known:
            return (text,)
        if text not in self._found:
            if len(self._found) >= MAX_PATTERNS:
                raise table.error(key, f"more than {MAX_PATTERNS} different patterns in one file")
            self._found[text] = tuple(
                name for name in self._names if fnmatch.fnmatchcase(name, text)
            )
        if not self._found[text]:
            # difflib takes quadratic time; a sample of the names is enough for a hint.
            hint = did_you_mean(text, islice(self._names, 2000))
            raise table.error(key, f"no device, host or switch is called {text!r}", hint)
        return self._found[text]


def _ends(table: FileTable, find: _PlaceFinder, left: int) -> Iterator[tuple[str, ...]]:
    """Ends of the links that one entry makes: one link for ``ends``, many for ``between``."""
    if ("ends" in table.data) == ("between" in table.data):
        raise table.error(
            "",
            "needs either 'ends' (one link or bus) or 'between' (one link per pair)",
            'write ends = ["gpu0", "gpu1"] or between = [["gpu*", "nvswitch"]]',
        )
    if "ends" in table.data:
        found = [find(text, table, "ends") for text in table.items("ends")]
        ends = tuple(dict.fromkeys(name for names in found for name in names))
        if len(ends) < max(2, len(found)) or left < 1:
            raise table.error("ends", "must name two or more different places")
        yield ends
        return
    for pair in table.items("between"):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise table.error("between", "must be a list of pairs", 'write [["gpu*", "nvswitch"]]')
        first, second = (find(text, table, "between") for text in pair)
        # Counted before the pairs are made: two patterns with 100,000 matches would fill the
        # memory.
        left -= len(first) * len(second)
        if left < 0:
            raise table.error("between", f"makes more than {MAX_LINKS} links")
        if len(first) == 1 and first == second:
            raise table.error("between", f"{first[0]!r} cannot be linked to itself")
        yield from _pairs(first, second)


def _pairs(first: tuple[str, ...], second: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """All pairs of different places, each pair once."""
    # Only places that occur on both sides can make a pair twice.
    both = set(first).intersection(second)
    seen: set[tuple[str, str]] = set()
    for src, dst in product(first, second):
        if src == dst or (dst, src) in seen:
            continue
        if src in both and dst in both:
            seen.add((src, dst))
        yield src, dst


def _host_links(
    devices: Sequence[Device],
    links: Sequence[Link],
    kinds: Mapping[str, KindEntry],
    names: LinkNames,
    top: FileTable,
) -> list[Link]:
    """A link to the host for each device that no link mentions; optional for a single device."""
    linked = {end for link in links for end in link.ends}
    made = []
    for device in devices:
        if device.name in linked:
            continue
        figures = kinds[device.kind.name].host_link
        if figures is not None:
            made.append(_link((device.name, device.host), names, figures))
        elif len(devices) > 1:
            raise top.error(
                "links",
                f"device {device.name!r} has no link, and its kind states no host_link",
                f"add [[links]] with {device.name!r} among its ends, "
                f'or host_link = {{ bandwidth = "12GB/s" }} in [kinds.{device.kind.name}]',
            )
    return made


def _link(ends: tuple[str, ...], names: LinkNames, figures: LinkFigures) -> Link:
    return Link(
        name=names.next(ends),
        ends=ends,
        bandwidth_bps=figures.bandwidth_bps,
        latency_s=figures.latency_s,
    )
