"""The loops of a step over all jobs and devices, compiled; imported where they are run."""
