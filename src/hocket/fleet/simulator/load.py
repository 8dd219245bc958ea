"""Compiled code, loaded (or compiled, the first time ever) before a run is timed."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hocket.fleet.rounds.events import Finish, Submit
from hocket.fleet.rounds.state import FleetDevice, Job, PairTable, Rules, new_state
from hocket.fleet.rounds.step import step
from hocket.fleet.simulator.record import new_totals


@lru_cache(maxsize=64)
def load_compiled(policy: str, mechanism: str, num_kinds: int, shares_devices: bool) -> None:
    """Let one job come and end in a fleet of one device, so that all code of a run is there."""
    from hocket.fleet.rounds.kernels.count import first_to_finish
    from hocket.fleet.simulator.tally import tally

    beside = PairTable(steps_per_s=np.zeros((1, 1, num_kinds))) if shares_devices else None
    rules, device = Rules(policy=policy, mechanism=mechanism), FleetDevice(name="one", kind="0")
    kinds = tuple(map(str, range(num_kinds)))
    state = new_state(kinds, (device,), rules, pair_table=beside)
    job = Job(number=0, name="", steps_per_s=(1.0,) * num_kinds, total_steps=1.0)
    state, actions = step(state, Submit(time_s=0.0, jobs=(job,)))
    first_to_finish(state.jobs)
    tally(
        state.time_s,
        0.0,
        state.layout.num_devices,
        new_totals(1, num_kinds),
        state.holders,
        state.device_kind,
        actions.started,
        actions.started_attempt,
        actions.stopped_reason,
    )
    step(state, Finish(time_s=1.0, numbers=(0,)))
