"""Costs of the stages of a pipeline: the input of its schedule and of its simulation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False, kw_only=True)
class StageCosts:
    """Costs of one pipeline's virtual stages per microbatch, and of its devices per step.

    Times are those of one device of the stage, with the collectives inside the stage included.
    """

    forward_s: tuple[float, ...]
    input_gradient_s: tuple[float, ...]
    weight_gradient_s: tuple[float, ...]
    """A full backward takes ``input_gradient_s + weight_gradient_s``; recomputation counts as the
    gradient of the inputs."""
    send_s: tuple[float, ...]
    """Time from the end of a stage to the start of the next, in either direction; one less than
    there are stages."""
    activation_bytes: tuple[int, ...]
    """Activations that a stage saves per microbatch from its forward to the end of its backward."""
    weight_gradient_bytes: tuple[int, ...]
    """Of that, what is kept until the gradient of the weights, where this comes later."""
    state_bytes: tuple[int, ...]
    """Per device: weights, gradients, optimizer state and working buffers."""
    after_s: tuple[float, ...]
    """Per device: what follows the last backward (gradients not hidden, optimizer)."""
