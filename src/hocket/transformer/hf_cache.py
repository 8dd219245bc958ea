"""Find Hugging Face configurations in the local cache, without downloads.

``hf:org/name`` means ``models--org--name/snapshots/REVISION/config.json`` in the cache that
``huggingface-cli download`` and ``from_pretrained`` fill.
"""

from __future__ import annotations

import re
from pathlib import Path

from hocket.base.config import huggingface_folder
from hocket.base.errors import UsageError, did_you_mean

PREFIX = "hf:"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


def cached_names() -> list[str]:
    """Names of the models with a configuration in the cache."""
    folder = huggingface_folder()
    if folder is None or not folder.is_dir():
        return []
    found = folder.glob("models--*/snapshots/*/config.json")
    names = {path.parts[-4].removeprefix("models--").replace("--", "/") for path in found}
    return sorted(names)


def cached_config(text: str) -> Path:
    """The ``config.json`` of ``hf:org/name``; raises `UsageError` if the cache has none."""
    name = text.removeprefix(PREFIX)
    if not _NAME.fullmatch(name):
        raise UsageError(f"cannot read {text[:100]!r}", hint="write it like hf:Qwen/Qwen2-0.5B")
    folder = huggingface_folder()
    if folder is None:
        raise UsageError(
            f"{text!r} needs the cache of Hugging Face models, and this user has no home folder",
            hint="set HF_HOME to a folder",
        )
    model = folder / f"models--{name.replace('/', '--')}"
    revision = _main_revision(model)
    snapshots = sorted(model.glob("snapshots/*/config.json"))
    # The main revision first; older snapshots are better than none.
    for path in (model / "snapshots" / revision / "config.json", *snapshots):
        if path.is_file():
            return path
    known = cached_names()
    near = f"{did_you_mean(name, known)} or " if known else ""
    raise UsageError(
        f"{name!r} is not in the cache of Hugging Face models ({folder})",
        hint=f"{near}run: huggingface-cli download {name} config.json",
    )


def _main_revision(model: Path) -> str:
    try:
        # Limited, because the text becomes part of a path.
        return (model / "refs" / "main").read_text(encoding="utf-8").strip()[:64] or "main"
    except (OSError, UnicodeDecodeError):
        return "main"
