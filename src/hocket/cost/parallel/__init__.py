"""Costs of the parallel training of a transformer: memory, traffic and time, in closed form."""
