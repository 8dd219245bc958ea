"""Piper: stages, tensor degree, data degree and recomputation per layer, from its own files."""

from hocket.contrib.piper.input import PiperInput, read_piper
from hocket.contrib.piper.planner import PiperPlan, PiperStage, piper_plan

__all__ = ["PiperInput", "PiperPlan", "PiperStage", "piper_plan", "read_piper"]
