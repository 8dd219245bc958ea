"""Scripts of people started as ranks of a plan; imports PyTorch."""

from __future__ import annotations

from hocket.api.refined import planned_again, require_single_ops
from hocket.cost.profile import read_profile
from hocket.runtime.launch import Machines, launch

__all__ = ["Machines", "launch", "planned_again", "read_profile", "require_single_ops"]
