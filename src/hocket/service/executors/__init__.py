"""Engines that run jobs: local processes, Ray, Slurm."""
