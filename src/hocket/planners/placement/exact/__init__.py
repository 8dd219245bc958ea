"""Every plan of a tiny graph, tried or ruled out."""
