"""Executors that run jobs: as local processes, on machines with agents, on Slurm."""
