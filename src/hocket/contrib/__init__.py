"""Seldom needed, or behind an extra: nothing outside imports from here but the command line.

A planner of this room is listed in `hocket.planners.registry` by the name of its module, which is
imported when the planner is first asked.
"""
