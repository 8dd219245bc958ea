"""Joint search over data, tensor and pipeline parallelism, for op graphs and transformer shapes."""
