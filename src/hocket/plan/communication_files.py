"""Files of planned collectives: the communication section with the cluster that it is for.

Written atomically, read strictly. The cluster stands inside, so that the schedule can be verified,
simulated and drawn again from the file alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.base import fields
from hocket.base.atomic import write_atomically
from hocket.base.errors import InputFileError
from hocket.base.jsonfile import dump_json, read_json
from hocket.hardware.cluster import Cluster
from hocket.hardware.files import cluster_from_dict, cluster_to_dict
from hocket.plan.parallel_files import stated_schemas
from hocket.plan.sections.communication import Communication

COMMUNICATION_SCHEMA = "hocket.communication/1"
MAX_BYTES = 200_000_000


@dataclass(frozen=True, eq=False)
class SavedCollective:
    """A schedule as it was read, with its cluster and what was claimed of it."""

    cluster: Cluster
    section: Communication
    claims: dict[str, Any]


def write_collective(
    path: str | Path, cluster: Cluster, section: Communication, claims: dict[str, Any]
) -> None:
    """Write a schedule; ``claims`` (rate, bound, certificate) are shown, never interpreted."""
    from hocket import __version__

    content = {
        "schema": COMMUNICATION_SCHEMA,
        "generator": f"hocket {__version__}",
        "cluster": {"hash": cluster.content_hash, "content": cluster_to_dict(cluster)},
        "communication": section.to_data(),
        "claims": claims,
    }
    write_atomically(path, dump_json(content))


def holds_collective(path: str | Path) -> bool:
    """Whether a file says that it holds a planned collective."""
    return COMMUNICATION_SCHEMA in stated_schemas(path)


def read_collective(path: str | Path) -> SavedCollective:
    """Read a schedule; raises `InputFileError`. It is not verified yet."""
    where = str(path)
    data = read_json(Path(path), max_bytes=MAX_BYTES)
    with fields.located(where):
        if not isinstance(data, dict) or data.get("schema") != COMMUNICATION_SCHEMA:
            raise InputFileError(
                f"this is not a {COMMUNICATION_SCHEMA} file", hint="make one with hocket collective"
            )
        keys = ("schema", "generator", "cluster", "communication", "claims")
        top = fields.record(data, "the file", required=keys)
        inner = fields.record(top["cluster"], "cluster", required=("hash", "content"))
        cluster = cluster_from_dict(fields.mapping(inner["content"], "cluster.content"), where)
        if inner["hash"] != cluster.content_hash:
            raise InputFileError("the schedule was made for another cluster than the file holds")
        section = Communication.from_data(top["communication"])
    return SavedCollective(cluster, section, dict(fields.mapping(top["claims"], "claims")))
