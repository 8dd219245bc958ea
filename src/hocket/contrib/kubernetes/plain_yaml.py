"""YAML that every reader reads alike: block style, all texts in double quotes, all signs in ASCII.

Plain texts of YAML can turn into numbers, dates, truth values, references or new keys; a quoted
text with escapes is nothing but itself. Keys are quoted as well unless they are plain words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

Value = str | int | bool | Mapping[str, "Value"] | Sequence["Value"]

_PLAIN_KEY = re.compile(r"(?!(?:true|false|null)$)[a-z][A-Za-z]{3,60}")
"""Short words are left out: some of them mean true or false, too."""
_ESCAPED = re.compile(r'[^\x20-\x7e]|["\\]')


def to_yaml(documents: Sequence[Mapping[str, Value]]) -> str:
    """The documents of one file, deterministic and in the order of their keys."""
    return "".join(
        "---\n" + "".join(f"{line}\n" for line in _lines(document)) for document in documents
    )


def _lines(value: Mapping[str, Value] | Sequence[Value]) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _entry(f"{_key(key)}:", entry)
        return
    for entry in value:
        yield from _entry("-", entry)


def _entry(head: str, value: Value) -> Iterator[str]:
    """A key or a dash with what belongs to it."""
    if isinstance(value, (str, int)):
        yield f"{head} {_scalar(value)}"
    elif not value:
        yield f"{head} {'{}' if isinstance(value, Mapping) else '[]'}"
    else:
        yield head
        yield from (f"  {line}" for line in _lines(value))


def _key(key: str) -> str:
    return key if _PLAIN_KEY.fullmatch(key) else quoted(key)


def _scalar(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return quoted(value) if isinstance(value, str) else str(value)


def quoted(text: str) -> str:
    """A text in double quotes."""
    return f'"{_ESCAPED.sub(_escape, text)}"'


def _escape(match: re.Match[str]) -> str:
    sign = match[0]
    if sign in '"\\':
        return f"\\{sign}"
    # Pairs of surrogates, as JSON has them, are two wrong signs in YAML.
    return f"\\u{ord(sign):04x}" if ord(sign) < 0x10000 else f"\\U{ord(sign):08x}"
