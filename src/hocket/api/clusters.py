"""Clusters: presets, files, shorthand, this machine."""

from __future__ import annotations

from hocket.base.extras import require
from hocket.hardware.cluster import Cluster
from hocket.hardware.detect import detect, detect_processor
from hocket.hardware.files import cluster_to_toml, read_machine
from hocket.hardware.kinds import PRESETS, preset_kinds
from hocket.hardware.shorthand import cluster_from_text, joining_note, machine_names

__all__ = [
    "PRESETS",
    "cluster_from_text",
    "cluster_to_toml",
    "detect",
    "detect_processor",
    "joining_note",
    "machine_names",
    "preset_kinds",
    "probe_links",
    "read_machine",
]


def probe_links() -> tuple[int, Cluster]:
    """This rank, and the links between all ranks of a launcher, measured; all must call this."""
    require("torch", "probing links")
    from hocket.runtime.collectives.launched import probe_launched

    return probe_launched()
