"""Rewriting of a step's graph under a memory section: offload, recompute, streaming, chunks.

The simulator times the rewritten graph, and the runtime executes it (`rewrite`).
"""
