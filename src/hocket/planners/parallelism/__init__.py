"""Dividing the training of one model: degrees, layers of stages, and the order of a pipeline."""
