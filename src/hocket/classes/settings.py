"""Settings of a split."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from hocket.base.errors import UsageError, did_you_mean

ANY_NUMBER = 0
"""As a number of parts: as many as answer soonest."""


USUAL_RATES = {"sgd": (0.05, 5e-4), "adamw": (1e-3, 0.05)}
"""Learning rate and weight decay of each optimizer."""


@dataclass(frozen=True, kw_only=True)
class NetTraining:
    """Training options of the whole net and of parts."""

    steps: int = 200
    limit_s: float | None = None
    """Training ends after so many seconds at the latest; the learning rate falls sooner then."""
    batch: int = 64
    optimizer: str = "sgd"
    """With momentum; "adamw" suits transformers."""
    learning_rate: float = 0.05
    weight_decay: float = 5e-4
    soft_weight: float = 0.7
    """Share of the whole net's opinion in the loss of a part; 0 for labels alone."""
    temperature: float = 2.0
    compiled: bool = False
    """By `torch.compile`, once for each shape of a part: worth its time in long trainings."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class HybridCriterion:
    """sensAI's test of a channel for a group of classes, after the rectifier.

    A channel is pruned if more than ``theta1`` of its activations are near zero and their mean is
    below ``theta2``: one that is mostly zero but sometimes strong stays.
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
    """One split, as it was asked for."""

    net: str
    data: str
    parts: int = ANY_NUMBER
    redundancy: int = 1
    target_s: float | None = None
    """Of an answer, over processes; where None, parts are as small as ``work`` says."""
    work: float = 0.25
    """Of the whole net, for each part without a target."""
    hybrid: HybridCriterion | None = None
    """Prune by these thresholds instead of to a budget; channels are not given back then."""
    accuracy_loss: float = 0.2
    """Points that may be lost on validation data."""
    unequal: bool = False
    """True if groups may have unequal numbers of classes."""
    alike: bool = False
    """True if all parts have the widths that all classes together want: one form, other weights."""
    train_steps: int = 0
    """Steps that the net is trained first; 0 where it is trained already."""
    retraining: NetTraining = field(default_factory=NetTraining)
    rounds: int = 4
    """Most rounds in which channels are given back."""
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
        if self.hybrid is not None and (self.target_s is not None or self.alike):
            raise UsageError(
                "thresholds decide what is pruned, not a target latency or a common form",
                hint="leave out --criterion hybrid, or --target-latency and --alike",
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

    def to_data(self) -> dict[str, Any]:
        """As JSON can write it."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> SplitRequest:
        """Inverse of `to_data`."""
        hybrid = data.get("hybrid")
        return cls(
            **{
                **data,
                "retraining": NetTraining(**data["retraining"]),
                "hybrid": None if hybrid is None else HybridCriterion(**hybrid),
            }
        )
