"""Write a parallel plan for other training programs; refuse what they cannot express."""

from hocket.export.targets import TARGETS, export_plan

__all__ = ["TARGETS", "export_plan"]
