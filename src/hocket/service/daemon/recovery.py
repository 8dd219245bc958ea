"""How a daemon begins: the world as it was stored, fitted to how the service was started now.

Nothing is replayed. Attempts that were open stay open; what became of them is asked of the executor
by the same look at all open attempts that `carry` takes every moment.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hocket.base.errors import InputFileError, UsageError
from hocket.fleet.rounds.state import FleetState, Rules, is_usable, lay_out, new_state
from hocket.service.daemon.commands import steps_per_s, with_config
from hocket.service.daemon.rehearse import rehearse_day, rehearse_round
from hocket.service.daemon.world import World, holder_index, violations
from hocket.service.records import JobRecord
from hocket.service.server_config import ServerConfig
from hocket.service.store.store import Store


def recovered(
    store: Store,
    rules: Rules,
    kinds: tuple[str, ...],
    config: ServerConfig,
    time_s: float,
) -> World:
    """The world that the store holds; raises `InputFileError` where its parts contradict, and
    `UsageError` where its jobs do not suit the policy, or no kind of device is known."""
    loaded = store.load()
    if loaded.state is None and not kinds:
        raise UsageError("the engine has no devices", hint="name those to come with --kinds")
    if loaded.state is None:
        state = new_state(kinds, (), rules, time_s=time_s)
    else:
        state = _refitted(loaded.state, rules, kinds, loaded.jobs)
    state = with_config(state, config).but(is_dirty=True)
    rehearse_day(rules, state.kinds)
    rehearse_round(state)
    waiting, held = holder_index(loaded.attempts)
    world = World(
        state=state,
        jobs=loaded.jobs,
        attempts=loaded.attempts,
        waiting=waiting,
        held=held,
        checkpoints=loaded.checkpoints,
        last_number=loaded.totals.last_number,
        last_sequence=loaded.totals.last_sequence,
        num_attempts=loaded.totals.num_attempts,
        num_checkpoints=loaded.totals.num_checkpoints,
    )
    for violation in violations(world):
        raise InputFileError(
            f"the stored fleet contradicts itself: {violation}", where=str(store.folder)
        )
    return world


def _refitted(
    state: FleetState, rules: Rules, kinds: tuple[str, ...], jobs: Mapping[int, JobRecord]
) -> FleetState:
    """The stored state under new rules, with kinds of devices that it did not know."""
    state = state.but(rules=rules)
    new = tuple(kind for kind in kinds if kind not in state.kinds)
    if not new:
        return state
    numbers = state.jobs.rows["number"].tolist()
    speeds = np.zeros((len(numbers), len(new)))
    for row, number in enumerate(numbers):
        if number in jobs:
            gang = int(state.jobs.rows["gang"][row])
            speeds[row] = steps_per_s(jobs[number].spec, new, gang)
    columns = {
        name: np.append(
            getattr(state.jobs, name),
            speeds if name.endswith("steps_per_s") else np.zeros(speeds.shape),
            axis=1,
        )
        for name in state.jobs._fields
        if name != "rows"
    }
    return state.but(
        kinds=(*state.kinds, *new),
        price_per_hour=np.append(state.price_per_hour, np.ones(len(new))),
        jobs=state.jobs._replace(**columns),
        layout=lay_out(
            state.device_kind, state.device_server, is_usable(state), state.num_kinds + len(new)
        ),
        warm=None,
    )
