"""Costs: the one place where predictions come from."""
