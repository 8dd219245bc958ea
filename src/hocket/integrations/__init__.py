"""Trainers of other libraries whose steps hocket runs: one module per library, imported by name."""
