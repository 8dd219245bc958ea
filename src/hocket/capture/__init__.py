"""A PyTorch model or training step as a Graph; the only planner-side room that imports torch."""
