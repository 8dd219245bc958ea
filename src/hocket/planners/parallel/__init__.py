"""Joint search over data, tensor and pipeline parallelism, for graphs and transformer shapes."""
