"""A memory section carried into the graph of a step, which the simulator then times."""
