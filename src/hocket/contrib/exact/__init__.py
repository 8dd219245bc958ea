"""Placement and order of small graphs as one constraint model, solved by CP-SAT."""
