"""Tables of all views: terminals print them, `hocket.view.page` writes them as HTML.

Numbers are never cut or wrapped. If the terminal is too narrow, names are shortened, then columns
are dropped by rank.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from hocket.view.names import shorten

SHORTEST_NAME = 28
"""Minimum width of names; if they would be shorter, a column is dropped instead."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a `FittedTable`."""

    title: str
    align: Literal["left", "right"] = "left"
    is_name: bool = False
    """True if cells may be shortened; other cells are printed in full or their column is dropped.
    """
    rank: int = 0
    """Columns of the highest rank are dropped first; columns of rank 0 always stay."""
    is_share: bool = False
    """True for percentages, which a page draws as bars beside the numbers."""


def name(title: str, rank: int = 0) -> Column:
    """Column of names."""
    return Column(title=title, is_name=True, rank=rank)


def number(title: str, rank: int = 0) -> Column:
    """Column of numbers."""
    return Column(title=title, align="right", rank=rank)


def share(title: str, rank: int = 0) -> Column:
    """Column of percentages."""
    return Column(title=title, align="right", rank=rank, is_share=True)


@dataclass(frozen=True, kw_only=True)
class FittedTable:
    """Table without lines; in a narrow terminal names are shortened, then columns dropped."""

    columns: tuple[Column, ...]
    rows: Sequence[Sequence[str | Text]]
    styles: Sequence[str] = ()
    """Style of each row: ``bold`` for the chosen one, ``dim`` for those that cannot be used."""
    indent: int = 2
    gap: int = 2
    least_gap: int = 2
    """Minimum number of blanks between columns; tried before a column is dropped."""

    @cached_property
    def cells(self) -> list[list[Text]]:
        """The rows as texts, each cell in the style of its row."""
        styles = self.styles or [""] * len(self.rows)
        return [
            [cell if isinstance(cell, Text) else Text(cell, style=style) for cell in row]
            for row, style in zip(self.rows, styles, strict=True)
        ]

    def without_empty(self) -> FittedTable:
        """Copy of the table without its empty columns."""
        said = [i for i in range(len(self.columns)) if any(row[i].plain for row in self.cells)]
        rows = [[row[i] for i in said] for row in self.cells]
        return replace(self, columns=tuple(self.columns[i] for i in said), rows=rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        gap = self.gap
        shown, widths = self._fit(options.max_width, gap)
        if len(shown) < len(self.columns) and self.least_gap < gap:
            gap = self.least_gap
            shown, widths = self._fit(options.max_width, gap)
        titles = [Text(column.title, style="dim") for column in self.columns]
        for row in (titles, *self.cells):
            line = Text(" " * self.indent, no_wrap=True, overflow="ignore")
            for index in shown:
                cell = row[index]
                if cell_len(cell.plain) > widths[index]:
                    cell = Text(shorten(cell.plain, widths[index]), style=cell.style)
                blanks = " " * (widths[index] - cell_len(cell.plain))
                is_right = self.columns[index].align == "right"
                line.append(blanks if is_right else "")
                line.append_text(cell)
                line.append("" if is_right else blanks)
                line.append(" " * gap)
            line.rstrip()
            yield line

    def _fit(self, max_width: int, gap: int) -> tuple[list[int], list[int]]:
        """Indices of the printed columns, and the width of every column."""
        widths = [
            max([cell_len(column.title), *(cell_len(row[i].plain) for row in self.cells)])
            for i, column in enumerate(self.columns)
        ]
        shown = list(range(len(self.columns)))
        while True:
            spare = max_width - self.indent - gap * (len(shown) - 1)
            over = sum(widths[i] for i in shown) - spare
            names = [i for i in shown if self.columns[i].is_name]
            if over <= sum(max(widths[i] - SHORTEST_NAME, 0) for i in names):
                break
            last = max(shown, key=lambda i: (self.columns[i].rank, i))
            if self.columns[last].rank == 0:
                break
            shown.remove(last)
        while over > 0 and names:
            widest = max(names, key=lambda i: (widths[i], i))
            if widths[widest] <= 1:
                break
            widths[widest] -= 1
            over -= 1
        return shown, widths


def plain(renderable: RenderableType, width: int = 80) -> str:
    """Render as text without colours, ``width`` cells wide, without blanks at line ends."""
    out = io.StringIO()
    console = Console(
        file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False,
        emoji=False, markup=False, highlight=False,
    )  # fmt: skip
    console.print(renderable, soft_wrap=False)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
