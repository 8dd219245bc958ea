"""The Plan and the Problem that it answers."""
