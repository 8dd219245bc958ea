"""Rewriting of a step's graph under a memory section, for the simulator to time."""
