"""Questions about the future, and the answers as plain data for a pipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from hocket.fleet.explain import Explanation, explain
from hocket.fleet.forecast import (
    Forecast,
    affordable_events,
    affordable_grain_s,
    at_moment,
    forecast,
    resized,
)
from hocket.fleet.rounds.state import FleetState
from hocket.fleet.what_if import TwoFutures, what_if

_BUSY_PART = 3
"""The queue of a page gets this part of the work that an explanation is worth."""

Data = dict[str, Any]


def answered(question: str, state: FleetState, time_s: float, asked: Mapping[str, Any]) -> Data:
    """The answer to a question about a state at a moment of its round."""
    return _QUESTIONS[question](at_moment(state, time_s), **asked)


def _explain(state: FleetState, number: int) -> Data:
    return explain(state, number).to_data()


def _starts(state: FleetState, numbers: list[int]) -> Data:
    """When jobs that wait get devices, for a page that many look at."""
    return forecast_to_data(
        forecast(
            state,
            until_started=numbers,
            grain_s=affordable_grain_s(state),
            max_events=max(affordable_events(state) // _BUSY_PART, 20),
        )
    )


def _forecast(state: FleetState, policy: str | None, num_devices: dict[str, int]) -> Data:
    add, remove = resized(state, num_devices)
    return forecast_to_data(forecast(state, policy=policy, add=add, remove=remove))


def _what_if(state: FleetState, policy: str | None, num_devices: dict[str, int]) -> Data:
    found = what_if(state, policy=policy, num_devices=num_devices)
    return {"now": forecast_to_data(found.now), "then": forecast_to_data(found.then)}


_QUESTIONS: dict[str, Callable[..., Data]] = {
    "explain": _explain,
    "starts": _starts,
    "forecast": _forecast,
    "what-if": _what_if,
}


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


def explanation_of(data: Data) -> Explanation:
    """Inverse of `Explanation.to_data`."""
    return Explanation(number=data["job"], **{key: data[key] for key in data if key != "job"})


def forecast_to_data(found: Forecast) -> Data:
    """A forecast with all of its columns; `Forecast.to_data` is the short form for users."""
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


def forecast_of(data: Data) -> Forecast:
    """Inverse of `forecast_to_data`."""
    columns = {
        name: np.array(value, np.int64 if name == "numbers" else np.float64)
        for name, value in data.items()
        if isinstance(value, list) and name != "names"
    }
    return Forecast(**{**data, **columns, "names": tuple(data["names"])})


def what_if_of(data: Data) -> TwoFutures:
    """Inverse of the answer to ``what-if``."""
    return TwoFutures(now=forecast_of(data["now"]), then=forecast_of(data["then"]))
