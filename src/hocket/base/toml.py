"""TOML as people write it, read with errors that they can act on."""

from __future__ import annotations

import tomllib
from typing import Any

from hocket.base.errors import InputFileError

_MAX_SHOWN = 200
"""Characters that an error repeats of what the reader of the standard library says."""


def parse_toml(data: bytes, hint: str = "texts need quotes") -> dict[str, Any]:
    """The tables of a TOML file; raises `InputFileError`, which `fields.located` gives the file."""
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise InputFileError("is not text in UTF-8", hint="save it as UTF-8") from None
    except RecursionError:
        raise InputFileError("is nested too deeply") from None
    except ValueError as error:  # tomllib's own error, and integers of over 4300 digits
        text = str(error)[:_MAX_SHOWN]
        raise InputFileError(f"is not TOML: {text[:1].lower()}{text[1:]}", hint=hint) from None
