"""Placements that fit into memory: found from scratch, repaired, or explained where none is found."""
