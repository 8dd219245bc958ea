"""Read untrusted JSON files with limits, and write JSON deterministically.

The first bytes must look like JSON before the rest is read. Size and decompression are bounded, and
repeated keys, NaN and deep nesting are refused. O(bytes) time; the parsed value takes at most a
fixed multiple of ``max_bytes``.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from hocket.base.errors import InputFileError, system_reason
from hocket.base.regular import open_regular

MAX_DEPTH = 64
"""Maximum nesting; files written by hocket have fewer than ten levels."""
MAX_CONTAINERS = 4_000_000
"""Maximum number of lists and objects in one file: each takes far more memory than its two bytes of
text.
"""
MAX_VALUES = 32_000_000
"""Maximum number of commas in one file, for the same reason; a graph of a million ops has 12 to 23
million.
"""
HEAD_BYTES = 64 * 1024
"""Number of bytes read to recognise the format."""
_CHUNK_BYTES = 2**20
_MIN_BOMB_BYTES = 64 * 2**20
"""Unpacked size that is allowed for any gzip file, however small."""
_MAX_RATIO = 60
"""Largest allowed compression ratio: real files have 3 to 9, a decompression bomb up to 1030."""


def finite_or_none(value: float) -> float | None:
    """The number, or None if JSON cannot represent it."""
    return float(value) if math.isfinite(value) else None


def read_json(path: str | Path, max_bytes: int = 512 * 2**20) -> object:
    """The value of a JSON file, plain or gzipped; raises `InputFileError` for anything else."""
    return parse_json(read_bounded(path, max_bytes, looks_like_json), str(path))


def looks_like_json(head: bytes) -> bool:
    """True if a file that starts with ``head`` can be a JSON object or list."""
    return head.lstrip(b" \t\r\n")[:1] in (b"{", b"[")


def read_bounded(
    path: str | Path, max_bytes: int, looks_right: Callable[[bytes], bool], what: str = "JSON"
) -> bytes:
    """Bytes of a file, decompressed if gzipped; files that are not ``what`` are refused early."""
    where = str(path)
    try:
        with open_regular(path) as file:
            start = file.read(2)
            file.seek(0)
            if start != b"\x1f\x8b":
                return _read_all(file, max_bytes, looks_right, where, what)
            packed_bytes = os.fstat(file.fileno()).st_size or max_bytes
            limit = min(max_bytes, max(_MIN_BOMB_BYTES, _MAX_RATIO * packed_bytes))
            with gzip.GzipFile(fileobj=file, mode="rb") as unpacked:
                return _read_all(unpacked, limit, looks_right, where, what)
    except FileNotFoundError:
        raise InputFileError("no such file", hint="check the path", where=where) from None
    except IsADirectoryError:
        raise InputFileError("is a folder", hint="name a file in it", where=where) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputFileError(
            f"the gzip data is damaged: {error}",
            hint="copy or make the file again; it may be cut off",
            where=where,
        ) from None
    except (OSError, ValueError) as error:
        reason = system_reason(error)
        raise InputFileError(
            f"cannot be read: {reason}", hint="check the path and its permissions", where=where
        ) from None


def _read_all(
    file: IO[bytes] | gzip.GzipFile,
    limit: int,
    looks_right: Callable[[bytes], bool],
    where: str,
    what: str,
) -> bytes:
    head = file.read(HEAD_BYTES)
    if not head.strip(b" \t\r\n") and len(head) < HEAD_BYTES:
        raise InputFileError("the file is empty", hint=f"expected {what}", where=where)
    if not looks_right(head):
        raise InputFileError(
            "the file does not start like anything that is expected here",
            hint=f"expected {what}, plain or gzipped",
            where=where,
        )
    chunks, size = [head], len(head)
    while size <= limit:
        chunk = file.read(_CHUNK_BYTES)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)
        size += len(chunk)
    raise InputFileError(
        f"the file holds more than {limit} bytes",
        hint="files of this size are refused before they fill the memory",
        where=where,
    )


def parse_json(data: bytes, where: str) -> object:
    """The value of JSON text; ``where`` names its file in errors."""
    # Counted before parsing, because the parser would allocate the memory first.
    for count, limit, what in (
        (data.count(b"[") + data.count(b"{"), MAX_CONTAINERS, "lists and objects"),
        (data.count(b","), MAX_VALUES, "values"),
    ):
        if count > limit:
            raise InputFileError(
                f"more than {limit} {what}",
                hint="files of this size are refused before they fill the memory",
                where=where,
            )
    try:
        value: object = json.loads(
            data.decode(), object_pairs_hook=_without_repetition, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError as error:
        raise InputFileError(
            f"byte {error.start} is not UTF-8", hint="save the file as UTF-8", where=where
        ) from None
    except RecursionError:
        raise _too_deep(where) from None
    except json.JSONDecodeError as error:
        raise InputFileError(
            f"not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            hint="correct the text there, or make the file again",
            where=where,
        ) from None
    except ValueError as error:
        raise InputFileError(f"not usable JSON: {error}", hint="correct it", where=where) from None
    if _is_deeper_than(value, MAX_DEPTH):
        raise _too_deep(where)
    return value


def dump_json(value: object) -> bytes:
    """JSON text, the same for equal values: sorted keys, shortest exact floats, ASCII, one line."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    # dict() keeps the last of equal keys silently; a shorter dictionary means that a key was
    # repeated.
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:60]!r} occurs twice in one object")
            seen.add(key)
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _is_deeper_than(value: object, depth: int) -> bool:
    level: list[Any] = [value] if isinstance(value, (list, dict)) else []
    # Level by level in place of recursion, which would itself overflow on deep input.
    for _ in range(depth):
        level = [
            item
            for container in level
            for item in (container.values() if type(container) is dict else container)
            if type(item) is list or type(item) is dict
        ]
        if not level:
            return False
    return True


def _too_deep(where: str) -> InputFileError:
    return InputFileError(
        f"lists and objects are nested deeper than {MAX_DEPTH} levels",
        hint="no file of hocket looks like this; check that it is the right one",
        where=where,
    )
