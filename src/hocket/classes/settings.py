"""Settings of a split: the request, training options and the pruning criterion."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hocket.base.errors import UsageError, did_you_mean

ANY_NUMBER = 0
"""Number of parts that means: choose the number with the shortest answer time."""


USUAL_RATES = {"sgd": (0.05, 5e-4), "adamw": (1e-3, 0.05)}
"""Default learning rate and weight decay of each optimizer."""


@dataclass(frozen=True, kw_only=True)
class NetTraining:
    """Training options of the unsplit net and of the parts."""

    steps: int = 200
    limit_s: float | None = None
    """Maximum seconds of training; the learning rate then decays with the elapsed time."""
    batch: int = 64
    optimizer: str = "sgd"
    """"sgd" (with momentum) or "adamw", which suits transformers."""
    learning_rate: float = 0.05
    weight_decay: float = 5e-4
    soft_weight: float = 0.7
    """Weight of the net's soft targets in the loss of a part; 0 for labels only."""
    temperature: float = 2.0
    compiled: bool = False
    """True to use `torch.compile`, once per shape of a part; worth it for long trainings."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class HybridCriterion:
    """sensAI's test whether a group of classes needs a channel, applied after the rectifier.

    A channel is pruned if more than the fraction ``theta1`` of its activations is near zero and
    their mean is below ``theta2``; a channel that is mostly zero but sometimes strong is kept.
    """

    theta1: float = 0.73
    theta2: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.theta1 <= 1 or not self.theta2 >= 0:
            raise UsageError(
                f"thresholds {self.theta1:g} and {self.theta2:g} are not possible",
                hint="the first is a share from 0 to 1, the second a mean activation, 0 or more",
            )


@dataclass(frozen=True, kw_only=True)
class SplitRequest:
    """All options of one split."""

    net: str
    data: str
    parts: int = ANY_NUMBER
    redundancy: int = 1
    target_s: float | None = None
    """Target time of an answer from worker processes; None to size parts by ``work``."""
    work: float = 0.25
    """Fraction of the net's work that each part may use if there is no target."""
    hybrid: HybridCriterion | None = None
    """Prune by these thresholds in place of a budget; no channels are restored then."""
    accuracy_loss: float = 0.2
    """Percentage points of accuracy that may be lost on validation data."""
    train_steps: int = 0
    """Steps to train the net before it is split; 0 if it is trained already."""
    retraining: NetTraining = field(default_factory=NetTraining)
    rounds: int = 4
    """Maximum number of rounds of restoring channels and retraining."""
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.parts < 0 or self.redundancy < 1:
            raise UsageError("a split needs one part and one copy of each class at least")
        if self.target_s is not None and self.target_s <= 0:
            raise UsageError("the target latency must be more than nothing")
        if self.retraining.limit_s is not None and self.retraining.limit_s <= 0:
            raise UsageError(
                "the limit of a training must be more than nothing", hint="such as 10min"
            )
        if self.hybrid is not None and self.target_s is not None:
            raise UsageError(
                "thresholds decide what is pruned, not a target latency",
                hint="leave out --criterion hybrid or --target-latency",
            )
        if not 0 < self.work <= 1:
            raise UsageError(f"parts cannot have {self.work} of the work", hint="such as 0.25")
        if not 0 <= self.accuracy_loss <= 100:
            raise UsageError(
                f"an accuracy loss of {self.accuracy_loss} points cannot be",
                hint="write points, such as 0.2",
            )
        if self.retraining.optimizer not in USUAL_RATES:
            raise UsageError(
                f"unknown optimizer {self.retraining.optimizer!r}",
                hint=did_you_mean(self.retraining.optimizer, USUAL_RATES),
            )
        if not 0 < self.retraining.learning_rate < math.inf:
            raise UsageError(
                f"a learning rate of {self.retraining.learning_rate} cannot be",
                hint="give one above 0, such as 0.05",
            )
