"""Sections of a plan: small frozen values with to_data, from_data and verify."""
