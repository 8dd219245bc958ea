"""Placement and order of small graphs as one constraint model, solved with a proof."""
