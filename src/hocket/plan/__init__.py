"""The problem to plan and the plan that solves it: data types, files and structural rules."""
