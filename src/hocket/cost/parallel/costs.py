"""Costs of the stages of a pipeline: the input of its schedule and its simulation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False, kw_only=True)
class StageCosts:
    """Costs of one pipeline: per microbatch of each virtual stage, and per step of each rank.

    Times are those of one device of the stage, including the collectives inside the stage.
    """

    forward_s: tuple[float, ...]
    input_gradient_s: tuple[float, ...]
    weight_gradient_s: tuple[float, ...]
    """Seconds for the gradients of the weights. A full backward pass takes ``input_gradient_s +
    weight_gradient_s``; recomputation is part of ``input_gradient_s``."""
    send_s: tuple[float, ...]
    """Seconds from the end of each stage to the start of the next, in either direction; one entry
    less than stages."""
    activation_bytes: tuple[int, ...]
    """Bytes of activations that a stage saves per microbatch until the end of its backward pass."""
    weight_gradient_bytes: tuple[int, ...]
    """Part of ``activation_bytes`` that stays until the weight gradients, if they are later."""
    state_bytes: tuple[int, ...]
    """Bytes per rank of weights, gradients, optimizer state and working buffers."""
    after_s: tuple[float, ...]
    """Seconds per rank after the last backward pass: exposed gradient collectives and optimizer."""
