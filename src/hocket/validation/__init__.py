"""Published measurements, and how well the predictions meet them."""
