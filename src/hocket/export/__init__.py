"""A parallel plan in the words of training programs; what they cannot say is refused."""

from hocket.export.targets import TARGETS, export_plan

__all__ = ["TARGETS", "export_plan"]
