"""Trainers of other libraries whose steps hocket runs; a module per library, imported by name."""
