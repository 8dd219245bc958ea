"""Carry out a parallel plan: one process per device with PyTorch's own kinds of parallelism.

Start with `hocket.runtime.sessions.division.run_division`; `check_division` in ``check`` compares a
division at toy size with one device.
"""
