"""The form that asks what would be under another policy or with other devices, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hocket.base.errors import HocketError, UsageError
from hocket.base.units import format_percent, words_for_seconds
from hocket.fleet.policies import POLICIES
from hocket.fleet.rounds.state import FleetState
from hocket.fleet.what_if import TwoFutures
from hocket.service.forecasts.forecaster import FleetForecaster
from hocket.view.names import LONGEST_SENTENCE, inert
from hocket.view.wording import sentence

POLICY_FIELD = "policy"
DEVICES_FIELD = "devices-"
"""Prefix of form field names; the name of a device type follows."""
_MAX_DIGITS = 9


@dataclass(frozen=True, kw_only=True)
class TypeField:
    """Form field for the number of devices of a type."""

    field: str
    device_type: str
    count: str
    """Text of the form field, which may be no number."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the answer."""

    label: str
    now: str
    then: str
    change: str = ""


@dataclass(frozen=True, kw_only=True)
class WhatIfAnswer:
    """Answer to a what-if question, or why there is none."""

    sentence: str
    figures: tuple[Figure, ...] = ()
    note: str = ""
    is_error: bool = False


@dataclass(frozen=True, kw_only=True)
class WhatIfForm:
    """The form as it is shown."""

    policies: tuple[str, ...]
    policy: str
    device_types: tuple[TypeField, ...]
    answer: WhatIfAnswer | None = None


def what_if_form(
    state: FleetState, fields: Mapping[str, str], answer: WhatIfAnswer | None
) -> WhatIfForm:
    """The form, filled with the submitted values or with the present ones."""
    device_types = tuple(
        TypeField(
            field=DEVICES_FIELD + inert(device_type),
            device_type=inert(device_type),
            count=inert(fields.get(DEVICES_FIELD + inert(device_type), str(count)), 20),
        )
        for device_type, count in zip(state.device_types, state.num_devices.tolist(), strict=True)
    )
    policy = inert(fields.get(POLICY_FIELD, state.rules.policy))
    return WhatIfForm(
        policies=tuple(POLICIES), policy=policy, device_types=device_types, answer=answer
    )


def is_asked(fields: Mapping[str, str]) -> bool:
    """True if a request asks for an answer."""
    return any(name == POLICY_FIELD or name.startswith(DEVICES_FIELD) for name in fields)


def answer_of(
    state: FleetState, fields: Mapping[str, str], forecaster: FleetForecaster | None = None
) -> WhatIfAnswer:
    """Answer a what-if question; an error in the question is an answer too."""
    try:
        counts = _counts(state, fields)
        policy = fields.get(POLICY_FIELD) or None
        found = (forecaster or FleetForecaster()).what_if(state, state.time_s, policy, counts)
    except HocketError as error:
        advice = f" ({error.hint})" if error.hint else ""
        said = sentence(inert(f"{error.message}{advice}", LONGEST_SENTENCE))
        return WhatIfAnswer(sentence=said, is_error=True)
    return _to_answer(found)


def _counts(state: FleetState, fields: Mapping[str, str]) -> dict[str, int]:
    counts = {}
    device_types = {inert(device_type): device_type for device_type in state.device_types}
    for name, text in fields.items():
        if not name.startswith(DEVICES_FIELD) or not text.strip():
            continue
        text = text.strip()
        if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
            raise UsageError(f"{inert(text, 20)!r} is no number of devices")
        device_type = name.removeprefix(DEVICES_FIELD)
        counts[device_types.get(device_type, device_type)] = int(text)
    return counts


def _to_answer(found: TwoFutures) -> WhatIfAnswer:
    """An answer in words and figures."""
    now_s, then_s = found.average_completion_s
    return WhatIfAnswer(
        sentence=_summary(now_s, then_s),
        figures=(
            Figure(
                label="Average time from submission to end",
                now=_words(now_s),
                then=_words(then_s),
                change=_change(now_s, then_s),
            ),
            _ended(found),
            _last_end(found),
            Figure(
                label="Devices in use",
                now=_percent(found.now.utilisation),
                then=_percent(found.then.utilisation),
            ),
            Figure(
                label="Preemptions",
                now=f"{found.now.num_preemptions:,}",
                then=f"{found.then.num_preemptions:,}",
            ),
        ),
        note=_note(found),
    )


def _summary(now_s: float, then_s: float) -> str:
    if not np.isfinite(now_s):
        return "Nothing can be compared: no job ends in both cases as far as was looked."
    if abs(then_s - now_s) <= 0.005 * now_s:
        return f"Jobs would end about as soon as now, after {_words(then_s)} on average."
    word = "sooner" if then_s < now_s else "later"
    return (
        f"Jobs would end {_words(abs(now_s - then_s))} {word} on average, "
        f"after {_words(then_s)} instead of {_words(now_s)}."
    )


def _ended(found: TwoFutures) -> Figure:
    now, then = found.num_ended
    total = len(found.now.numbers)
    return Figure(label="Jobs that end", now=f"{now:,} of {total:,}", then=f"{then:,} of {total:,}")


def _last_end(found: TwoFutures) -> Figure:
    now, then = (_in(future.last_end_s, future.time_s) for future in (found.now, found.then))
    if np.isfinite(found.horizon_s):
        now = then = "not seen"
    return Figure(label="The last job ends", now=now, then=then)


def _note(found: TwoFutures) -> str:
    text = (
        "Jobs that come later are not known; a job of unknown length never ends. "
        "Averages are over jobs that end in both cases."
    )
    if np.isfinite(found.horizon_s):
        span = words_for_seconds(found.horizon_s - found.now.time_s)
        text += f" Large fleets are looked at for a bounded time only: here the next {span}."
    return text


def _in(moment_s: float, from_s: float) -> str:
    return f"in {_words(moment_s - from_s)}" if np.isfinite(moment_s) else "–"


def _words(duration_s: float) -> str:
    return words_for_seconds(duration_s) if np.isfinite(duration_s) else "–"


def _percent(part: float) -> str:
    return format_percent(part) if np.isfinite(part) else "–"


def _change(now_s: float, then_s: float) -> str:
    if not (np.isfinite(now_s) and now_s > 0.0):
        return ""
    percent = round(100.0 * (then_s / now_s - 1.0))
    return f"{percent:+} %".replace("-", "−") if percent else "none"
