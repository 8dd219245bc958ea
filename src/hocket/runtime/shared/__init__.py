"""Shares of a batch carried out: accumulation in one process, replicas in several."""
