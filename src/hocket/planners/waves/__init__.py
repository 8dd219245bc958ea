"""Two waves of one training on the same devices, the second behind the first (Wavelet)."""
