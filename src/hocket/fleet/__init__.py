"""Many jobs share a mixed cluster: who runs where, in rounds, simulated or for real."""
