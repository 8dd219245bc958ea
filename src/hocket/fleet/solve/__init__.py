"""Solvers for shares: classes of equal jobs, prices of devices, levels that rise together."""
