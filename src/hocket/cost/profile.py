"""Profile: measured seconds of op signatures on one device type, in memory and as a file.

Each entry also keeps the work of the op, so that a profile can be calibrated without its graphs,
and the op's time in a replayed step if measured. The file is ``hocket.profile/1`` JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hocket.base import fields
from hocket.base.atomic import write_atomically
from hocket.base.errors import InputFileError, UsageError
from hocket.base.jsonfile import dump_json, read_json
from hocket.cost.efficiency import OpWork
from hocket.cost.families import family_index, refine
from hocket.cost.host import HostOverhead
from hocket.cost.replayed_kernels import InPlace
from hocket.graph.graph import DTYPES, Graph

PROFILE_SCHEMA = "hocket.profile/1"
MAX_FILE_BYTES = 64 * 2**20
MAX_SECONDS = 1e6
_MAX_COUNT = 2**62
_MAX_BESIDE = 1000.0
_SCHEMA = re.compile(r"hocket\.[a-z]{1,20}/[0-9]{1,6}")
_MAX_OP_BYTES = 2**50


@dataclass(frozen=True, kw_only=True)
class ProfileEntry:
    """One op signature: its work on the device and its measured time."""

    signature: str
    kind: str
    dtype: str
    flops: float
    bytes_touched: int
    count: int
    """Number of ops of the profiled step with this signature."""
    seconds: float
    """Median device time of one call."""
    workspace_bytes: int = 0
    """Bytes that the call allocates besides its inputs and outputs; 0 if not measured."""
    replayed: InPlace | None = None
    """The same call in a step replayed as one CUDA graph; None if not measured."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Profile:
    """Measurements on one device type."""

    device_kind: str
    """Name of the device type that the numbers hold for."""
    device: str
    """Device name as its driver reports it."""
    versions: Mapping[str, str]
    host: HostOverhead
    reserved_bytes: int = 0
    """Bytes that libraries keep on the device after their first use (matrix product workspaces)."""
    entries: tuple[ProfileEntry, ...]
    """Entries, sorted by signature."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Signatures without a time, with the reason."""

    @cached_property
    def by_signature(self) -> Mapping[str, ProfileEntry]:
        """Entries by their signature."""
        return {entry.signature: entry for entry in self.entries}

    def work(self) -> OpWork:
        """Work of the entries on a device, in their order."""
        every = np.arange(len(self.entries), dtype=np.int32)
        signatures = [entry.signature for entry in self.entries]
        return OpWork(
            refine(family_index(entry.kind for entry in self.entries), every, signatures),
            np.array([DTYPES.index(entry.dtype) for entry in self.entries], dtype=np.int8),
            np.array([entry.flops for entry in self.entries], dtype=np.float64),
            np.array([entry.bytes_touched for entry in self.entries], dtype=np.float64),
            every,
            signatures,
        )

    def __repr__(self) -> str:
        return f"Profile({self.device_kind!r}, {len(self.entries)} signatures)"


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """Merge profiles of one device type: counts add up, the first time of an op is kept.

    Host overheads and reserved bytes are those of the first profile.
    """
    first = profiles[0]
    entries: dict[str, ProfileEntry] = {}
    missing: dict[str, str] = {}
    for profile in profiles:
        if profile.device_kind != first.device_kind:
            raise UsageError(
                f"cannot merge profiles of {first.device_kind!r} and {profile.device_kind!r}",
                hint="merge only profiles of one kind of device",
            )
        missing.update(profile.missing)
        for entry in profile.entries:
            known = entries.get(entry.signature)
            count = entry.count + (known.count if known else 0)
            # The first time of a signature counts, but all of its ops.
            entries[entry.signature] = replace(known or entry, count=count)
    return replace(
        first,
        entries=tuple(entries[signature] for signature in sorted(entries)),
        missing={key: missing[key] for key in sorted(missing) if key not in entries},
    )


def require_times(profile: Profile) -> None:
    """Refuse a profile without any timed op: costs fitted to it would be arbitrary."""
    if any(entry.seconds > 0 for entry in profile.entries):
        return
    raise UsageError(
        f"the profile of {profile.device_kind!r} has no measured times",
        hint="profile again, with a larger --seconds if time ran out",
    )


def with_measured_workspace(graph: Graph, profile: Profile) -> Graph:
    """The graph with measured workspaces for those ops whose signature the profile has."""
    workspace_bytes = graph.workspace_bytes.copy()
    for op, signature in enumerate(graph.op_signature.tolist()):
        if signature >= 0:
            entry = profile.by_signature.get(graph.signatures[signature])
            if entry is not None:
                workspace_bytes[op] = entry.workspace_bytes
    return replace(graph, workspace_bytes=workspace_bytes)


def write_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile file, atomically."""
    write_atomically(path, dump_json(profile_to_dict(profile)))


def read_profile(path: str | Path) -> Profile:
    """Read a profile file; raises `InputFileError` for anything else."""
    return profile_from_dict(read_json(path, MAX_FILE_BYTES), str(path))


def profile_to_dict(profile: Profile) -> dict[str, Any]:
    """The profile as JSON values."""
    return {
        "schema": PROFILE_SCHEMA,
        "device_kind": profile.device_kind,
        "device": profile.device,
        "versions": dict(sorted(profile.versions.items())),
        "host": asdict(profile.host),
        "reserved_bytes": profile.reserved_bytes,
        "entries": [_entry_to_dict(entry) for entry in profile.entries],
        "missing": dict(sorted(profile.missing.items())),
    }


def profile_from_dict(data: object, where: str) -> Profile:
    """Read a profile from `profile_to_dict`; ``where`` names its file in errors."""
    with fields.located(where):
        return _profile(data)


def host_from_dict(data: object, path: str) -> HostOverhead:
    """Host overheads from JSON values."""
    keys = ("forward_s", "backward_s", "optimizer_s")
    host = fields.record(data, path, required=(*keys, "overlaps"))
    seconds = {key: fields.number(host[key], f"{path}.{key}", 0, MAX_SECONDS) for key in keys}
    return HostOverhead(**seconds, overlaps=fields.flag(host["overlaps"], f"{path}.overlaps"))


def check_schema(data: object, schema: str, hint: str) -> None:
    """Refuse files of another schema before their keys are read."""
    found = data.get("schema") if isinstance(data, Mapping) else None
    if isinstance(found, str) and found != schema and _SCHEMA.fullmatch(found):
        raise InputFileError(f"this is a {found} file, expected {schema}", hint=hint)


def _profile(data: object) -> Profile:
    check_schema(
        data, PROFILE_SCHEMA, "make one with hocket profile; a calibration goes to --calibration"
    )
    top = fields.record(
        data,
        "the profile",
        required=("schema", "device_kind", "device", "versions", "host", "entries"),
        optional=("reserved_bytes", "missing"),
    )
    fields.choice(top["schema"], "schema", (PROFILE_SCHEMA,))
    entries = [
        _entry(item, f"entries[{index}]")
        for index, item in enumerate(fields.items(top["entries"], "entries"))
    ]
    entries.sort(key=lambda entry: entry.signature)
    for first, second in pairwise(entries):
        if first.signature == second.signature:
            raise InputFileError(
                f"signature {fields.shown(first.signature)} occurs twice in entries",
                hint="keep one of the entries",
            )
    return Profile(
        device_kind=fields.text(top["device_kind"], "device_kind"),
        device=fields.text(top["device"], "device"),
        versions=_texts(top["versions"], "versions"),
        host=host_from_dict(top["host"], "host"),
        reserved_bytes=fields.integer(
            top.get("reserved_bytes", 0), "reserved_bytes", 0, _MAX_COUNT
        ),
        entries=tuple(entries),
        missing=_texts(top.get("missing", {}), "missing"),
    )


def _entry_to_dict(entry: ProfileEntry) -> dict[str, Any]:
    data = asdict(entry)
    del data["replayed"]
    if entry.replayed is None:
        return data
    replayed = {key: value for key, value in entry.replayed._asdict().items() if value is not None}
    return {**data, "replayed": replayed}


def _in_place(data: object, path: str) -> InPlace:
    found = fields.record(data, path, required=InPlace._fields[:-1], optional=("beside",))
    beside = found.get("beside")
    return InPlace(
        fields.number(found["seconds"], f"{path}.seconds", 0, MAX_SECONDS),
        fields.integer(found["kernels"], f"{path}.kernels", 1, _MAX_COUNT),
        fields.number(found["fill"], f"{path}.fill", 0, 1),
        None if beside is None else fields.number(beside, f"{path}.beside", 1, _MAX_BESIDE),
    )


def _entry(data: object, path: str) -> ProfileEntry:
    keys = ("signature", "kind", "dtype", "flops", "bytes_touched", "count", "seconds")
    entry = fields.record(data, path, required=keys, optional=("workspace_bytes", "replayed"))
    return ProfileEntry(
        signature=fields.text(entry["signature"], f"{path}.signature"),
        kind=fields.text(entry["kind"], f"{path}.kind"),
        dtype=fields.choice(entry["dtype"], f"{path}.dtype", DTYPES),
        flops=fields.number(entry["flops"], f"{path}.flops", 0, 1e24),
        bytes_touched=fields.integer(
            entry["bytes_touched"], f"{path}.bytes_touched", 0, _MAX_OP_BYTES
        ),
        count=fields.integer(entry["count"], f"{path}.count", 1, _MAX_COUNT),
        seconds=fields.number(entry["seconds"], f"{path}.seconds", 0, MAX_SECONDS),
        workspace_bytes=fields.integer(
            entry.get("workspace_bytes", 0), f"{path}.workspace_bytes", 0, _MAX_OP_BYTES
        ),
        replayed=_in_place(entry["replayed"], f"{path}.replayed") if "replayed" in entry else None,
    )


def _texts(data: object, path: str) -> dict[str, str]:
    texts = fields.mapping(data, path)
    return {key: fields.text(texts[key], fields.inside(path, key)) for key in sorted(texts)}
