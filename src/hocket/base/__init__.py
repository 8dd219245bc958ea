"""Foundations of all packages: errors, units, arrays, settings, and checked, atomic files."""
