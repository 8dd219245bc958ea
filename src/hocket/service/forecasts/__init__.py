"""Forecasts of the fleet's future, computed one at a time and separately from the daemon."""
