"""Strategies that execute a plan in the user's training loop, with its own model and optimizer."""
