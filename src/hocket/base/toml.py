"""Parse TOML files, with errors that say what to change."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from hocket.base.errors import InputFileError

_MAX_SHOWN = 200
"""Maximum length of the parser's message in an error."""

_MAX_KEYS = 64
_TEXT = re.compile(rb"\"(?:[^\"\\]|\\.)*\"|'[^']*'")
_DEEP = re.compile(rb"(?:[A-Za-z0-9_-]+[ \t]*\.[ \t]*){%d}" % _MAX_KEYS)


def parse_toml(data: bytes, hint: str = "texts need quotes") -> dict[str, Any]:
    """Parse a TOML file; raises `InputFileError`, to which `fields.located` adds the file name."""
    _refuse_deep_keys(data)
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise InputFileError("is not text in UTF-8", hint="save it as UTF-8") from None
    except RecursionError:
        raise InputFileError("is nested too deeply") from None
    except ValueError as error:  # tomllib's own error, and integers of over 4300 digits
        text = str(error)[:_MAX_SHOWN]
        raise InputFileError(f"is not TOML: {text[:1].lower()}{text[1:]}", hint=hint) from None


def _refuse_deep_keys(data: bytes) -> None:
    """Refuse dotted keys with many parts.

    The standard library stores every prefix of a key, which takes gigabytes for a key of 100 KB.
    """
    for line in data.splitlines():
        if line.count(b".") >= _MAX_KEYS and _DEEP.search(_TEXT.sub(b"k", line)):
            raise InputFileError(f"is nested too deeply: a key has more than {_MAX_KEYS} parts")
