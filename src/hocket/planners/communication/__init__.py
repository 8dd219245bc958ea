"""Planned collectives: trees, chunks and priorities on the links of a cluster (after Blink)."""
