"""A person's own training loop, carried by a plan: their model, their optimizer, their batches."""
