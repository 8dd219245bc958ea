"""Make names safe to print: control characters never reach a terminal or a page.

Names of ops, devices and planners come from files of unknown origin. Also shortens names to a
width.
"""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size

LONGEST_NAME = 160
"""Length at which printed names are cut; plans keep the full name."""
LONGEST_SENTENCE = 2000


def inert(text: str, longest: int = LONGEST_NAME) -> str:
    """Text on one line with unprintable characters escaped, cut if it is too long."""
    cut = text if len(text) <= longest else text[: longest - 1] + "…"
    if cut.isprintable():
        return cut
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut
    )


def shorten(text: str, width: int) -> str:
    """Text cut to ``width`` terminal cells, with … at the end if it was longer."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, max(width - 1, 0)).rstrip() + "…" if width > 0 else ""


def shorten_middle(text: str, width: int) -> str:
    """Text cut in the middle; link names end with their direction, which must stay."""
    if cell_len(text) <= width:
        return text
    # Three fifths for the end, because the ends of link names distinguish them.
    tail = max((width - 1) * 3 // 5, 0)
    return shorten(text, width - tail) + text[len(text) - tail :]
