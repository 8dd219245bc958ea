"""Training within a memory budget: offload, prefetch, recompute, host optimizer, dry run."""
