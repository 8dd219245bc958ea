"""What the parallel training of a transformer costs: memory, traffic and time, in closed form."""
