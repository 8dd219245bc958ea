"""Plans as files of other programs."""

from __future__ import annotations

from hocket.export import export_plan
from hocket.export.accelerate import device_map
from hocket.export.compile_trees import program_of
from hocket.export.msccl import parse_msccl, to_msccl
from hocket.export.mscclpp import program_of_plan, to_mscclpp
from hocket.export.nccl_graph import to_nccl_graph
from hocket.export.program import run_program

__all__ = [
    "device_map",
    "export_plan",
    "parse_msccl",
    "program_of",
    "program_of_plan",
    "run_program",
    "to_msccl",
    "to_mscclpp",
    "to_nccl_graph",
]
