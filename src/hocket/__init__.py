"""hocket decides where machine-learning work computes, shows the decision and carries it out."""

__version__ = "0.1.0"
