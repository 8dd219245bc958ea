"""Hooks of the docs site: links to files of the repository outside of docs/ become their paths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links that leave docs/, which the site does not have."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def replaced(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        if "://" in target:
            return match[0]
        path = (folder / target).resolve()
        if path.is_relative_to(ROOT / "docs") and not path.is_dir():
            return match[0]
        return f"{text} (`{path.relative_to(ROOT)}`)"

    return _LINK.sub(replaced, markdown)
