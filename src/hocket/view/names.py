"""Make names safe to show: control characters cannot reach a terminal or a page.

Op, device and planner names come from files that anyone may have written.
"""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size

LONGEST_NAME = 160
"""Longest name that is shown; plans keep the full name."""
LONGEST_SENTENCE = 2000


def inert(text: str, longest: int = LONGEST_NAME) -> str:
    """The text on one line with every unprintable character written as an escape, cut if long."""
    cut = text if len(text) <= longest else text[: longest - 1] + "…"
    if cut.isprintable():
        return cut
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut
    )


def shorten(text: str, width: int) -> str:
    """The text in at most ``width`` terminal cells, its end replaced by … where it is longer."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, max(width - 1, 0)).rstrip() + "…" if width > 0 else ""


def shorten_middle(text: str, width: int) -> str:
    """Like `shorten`, but keeps both ends: the name of a link ends with its direction."""
    if cell_len(text) <= width:
        return text
    tail = max((width - 1) * 3 // 5, 0)
    return shorten(text, width - tail) + text[len(text) - tail :]
