"""Parts of the local search: what can move, what a move might gain, what to try."""
