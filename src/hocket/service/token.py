"""The secret that people prove themselves with: one per state folder, for its owner's eyes only."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from hocket.errors import InputFileError

NAME = "token"
MIN_LENGTH = 20
_MAX_BYTES = 1000


def read_token(folder: Path) -> str | None:
    """The token of a state folder, None where there is none yet; raises `InputFileError` for a file
    that others can read or that holds no token."""
    path = folder / NAME
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputFileError(f"cannot read the token: {error.strerror}", where=str(path)) from None
    if stat.S_IMODE(mode) & 0o077:
        hint = f"chmod 600 {path}, or delete it for a new one"
        raise InputFileError("others can read the token", hint=hint, where=str(path))
    token = data.decode("ascii", "replace").strip()
    if len(token) < MIN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise InputFileError("this is no token", hint="delete it for a new one", where=str(path))
    return token


def make_token(folder: Path) -> str:
    """The token of a state folder, a fresh one where there is none."""
    token = read_token(folder)
    if token is not None:
        return token
    token = secrets.token_urlsafe(32)
    try:
        _write(folder / NAME, token)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputFileError(f"cannot write the token: {reason}", where=str(folder)) from None
    return token


def _write(path: Path, token: str) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    # Private from its first moment: a mode set afterwards leaves time to read it.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(token + "\n")
        file.flush()
        os.fsync(descriptor)
    os.replace(temporary, path)
