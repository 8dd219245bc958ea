"""Trees, chunks and priorities of collectives on given links."""
