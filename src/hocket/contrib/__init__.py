"""Seldom needed, or behind an extra: nothing outside imports from here but the command line."""
