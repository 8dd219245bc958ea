"""Memory, traffic and time of a transformer's parallel training, in closed form."""
