"""Waves: microbatches of one training step that overlap on the same devices (Wavelet, 2021)."""
