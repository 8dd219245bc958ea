"""Strategies that execute a plan in a training loop, with the user's model and optimizer."""
