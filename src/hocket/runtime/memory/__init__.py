"""Training steps that hold no more than a number of bytes on their device."""
