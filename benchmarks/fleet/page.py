"""CPU time of what people wait for at a large fleet: an explanation, the page, "what if".

    python benchmarks/fleet/page.py [--jobs 2048] [--devices 300]

All jobs differ in speed and length; two policies. Times are CPU seconds of this process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from hocket.fleet.explain import explain
from hocket.fleet.rounds import FleetDevice, FleetState, Job, Rules, new_state, step
from hocket.fleet.rounds.events import Submit, Tick
from hocket.fleet.rounds.state import WAITING
from hocket.fleet.what_if import what_if
from hocket.service.page.rendering import live_page
from hocket.service.page.router import Foresight
from hocket.service.page.templating import render
from hocket.service.page.what_if import what_if_form

DEVICE_TYPES = ("v100", "p100", "k80")


def fleet(num_jobs: int, num_devices: int, policy: str) -> FleetState:
    random = np.random.default_rng(0)
    devices = tuple(
        FleetDevice(name=f"{DEVICE_TYPES[at % 3]}-{at}", device_type=DEVICE_TYPES[at % 3])
        for at in range(num_devices)
    )
    speeds = random.uniform(1.0, 10.0, (num_jobs, 3)) * (1.0, 0.5, 0.25)
    minutes = 10.0 ** random.uniform(1.5, 4.0, num_jobs)
    jobs = tuple(
        Job(
            number=at + 1,
            name=f"job {at}",
            steps_per_s=tuple(speeds[at]),
            total_steps=float(60.0 * minutes[at] * speeds[at, 0]),
            gang=int(random.choice([1, 1, 1, 2, 4])),
        )
        for at in range(num_jobs)
    )
    state = new_state(DEVICE_TYPES, devices, Rules(policy=policy), time_s=1e9)
    state = step(state, Submit(time_s=1e9, jobs=jobs))[0]
    return step(state, Tick(time_s=state.next_tick_s))[0]


def page_of(state: FleetState, foresight: Foresight) -> str:
    page = live_page(state, foreseen=foresight.of(state))
    return render("fleet.html", page=page, form=what_if_form(state, {}, None))


def cpu_ms(work: Callable[[], object]) -> list[float]:
    """The first call compiles and is not counted."""
    work()
    times_ms = []
    for _ in range(3):
        start_s = time.process_time()
        work()
        times_ms.append(1e3 * (time.process_time() - start_s))
    return times_ms


def works_of(state: FleetState) -> dict[str, Callable[[], object]]:
    waiting = state.jobs.rows["number"][state.jobs.rows["phase"] == WAITING].tolist()
    kept = Foresight()
    return {
        "explain, a job in the middle": lambda: explain(state, waiting[len(waiting) // 2]),
        "page, with a new forecast": lambda: page_of(state, Foresight()),
        "page, forecast of this round kept": lambda: page_of(state, kept),
        "what if, another policy": lambda: what_if(state, policy="fifo"),
        "what if, half more of a device type": lambda: what_if(state, num_devices={"v100": 150}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2048)
    parser.add_argument("--devices", type=int, default=300)
    arguments = parser.parse_args()
    for policy in ("las", "finish-time-fairness"):
        state = fleet(arguments.jobs, arguments.devices, policy)
        print(f"{arguments.jobs:,} jobs, {arguments.devices:,} devices, {policy}")
        for name, work in works_of(state).items():
            times_ms = cpu_ms(work)
            print(f"  {name:<36} {np.median(times_ms):6.0f} ms, at most {max(times_ms):6.0f} ms")
        print(f"  the page has {len(page_of(state, Foresight())):,} characters")


if __name__ == "__main__":
    main()
