"""The problem to plan and the plan that solves it: data types, files and structural rules.

`problem` has the input of planners, `plan` the decisions as `sections`, `claims` the predictions
and bounds. `files` reads and writes plan files, `verify` checks what needs no simulation.
"""
