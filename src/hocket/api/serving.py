"""Classifiers split by class, served; imports what serves HTTP."""

from __future__ import annotations

from hocket.classes.artefact import Folder, read_folder
from hocket.classes.serving.app import MAX_DEADLINE_S
from hocket.classes.serving.front_end import ServeOptions
from hocket.classes.serving.rehearsal import LatencyOutlook, rehearsed
from hocket.classes.serving.serve import serve, token_in

__all__ = [
    "MAX_DEADLINE_S",
    "Folder",
    "LatencyOutlook",
    "ServeOptions",
    "read_folder",
    "rehearsed",
    "serve",
    "token_in",
]
