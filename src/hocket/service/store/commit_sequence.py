"""A file that remembers the last commit, so that a database that forgot it is found out.

A database in write-ahead mode opens without complaint when its log was cut, damaged or left behind:
it is then merely older. This file holds the number of the last commit that was acknowledged; a
database with a lower number has lost something that was promised. Two slots are written in turn, so
that a write that was cut leaves the one before.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

from hocket.base.errors import InputFileError
from hocket.service.plain_file import open_plain

NAME = "commit-sequence"
_SLOT_BYTES = 512
"""A sector: written whole or not at all by most disks."""
_HEAD = b"hocketw1"
_BODY = struct.Struct(">8s16sQ")
_CRC = struct.Struct(">I")


class CommitSequence:
    """An open commit sequence; ``number`` is the last commit that it knows."""

    def __init__(self, descriptor: int, identity: bytes, number: int) -> None:
        self._descriptor = descriptor
        self.identity = identity
        self.number = number

    @classmethod
    def create(cls, folder: Path, identity: bytes) -> CommitSequence:
        """A new file, before the first commit. It appears whole or not at all: one that was cut
        would be taken for damage, though nothing was ever promised."""
        path = folder / f"{NAME}.new"
        commit_sequence = cls(open_plain(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), identity, 0)
        os.pwrite(commit_sequence._descriptor, 2 * commit_sequence._slot(0), 0)
        os.fsync(commit_sequence._descriptor)
        os.rename(path, folder / NAME)
        return commit_sequence

    @classmethod
    def open(cls, folder: Path) -> CommitSequence:
        """The commit sequence of a folder; raises `InputFileError` where both slots are damaged."""
        descriptor = open_plain(folder / NAME, os.O_RDWR)
        data = os.pread(descriptor, 2 * _SLOT_BYTES + 1, 0)
        slots = [_read(data[slot * _SLOT_BYTES :][:_SLOT_BYTES]) for slot in range(2)]
        known = [slot for slot in slots if slot is not None]
        if not known or len({identity for identity, _ in known}) != 1 or len(data) % _SLOT_BYTES:
            os.close(descriptor)
            raise InputFileError("the commit sequence is damaged", where=str(folder / NAME))
        identity, number = max(known)
        return cls(descriptor, identity, number)

    def record(self, number: int) -> None:
        """Remember a commit; on disk when this returns."""
        os.pwrite(self._descriptor, self._slot(number), number % 2 * _SLOT_BYTES)
        os.fdatasync(self._descriptor)
        self.number = number

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def _slot(self, number: int) -> bytes:
        body = _BODY.pack(_HEAD, self.identity, number)
        return (body + _CRC.pack(zlib.crc32(body))).ljust(_SLOT_BYTES, b"\0")


def _read(slot: bytes) -> tuple[bytes, int] | None:
    """Identity and number of a slot; None where it is damaged."""
    if len(slot) != _SLOT_BYTES:
        return None
    body = slot[: _BODY.size]
    (crc,) = _CRC.unpack_from(slot, _BODY.size)
    head, identity, number = _BODY.unpack(body)
    if head != _HEAD or crc != zlib.crc32(body):
        return None
    return bytes(identity), int(number)
