"""Application of a memory section to the graph of a step, which the simulator then times."""
