"""A daemon as a process of its own, asked through pipes: a line of JSON in, one out.

    python killable_daemon.py FOLDER

It runs jobs as local processes. `killable_daemon.py` is meant to be killed; see `kill_trials`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from hocket.base.errors import HocketError
from hocket.fleet.rounds.state import FleetDevice, Rules
from hocket.service.daemon import Daemon
from hocket.service.executors.local import LocalExecutor
from hocket.service.spec import JobSpec
from hocket.service.store import Store

DEVICES = tuple(
    FleetDevice(name=f"v100-{index}", device_type="v100", server="here") for index in range(4)
)
# Jobs last a few rounds, and others may take their devices after one.
RULES = Rules(round_s=1.0, stickiness_rounds=1.0, slack_rounds=0.0, max_failures=3)


def answer(daemon: Daemon, request: dict[str, Any]) -> dict[str, Any]:
    """What a request gets."""
    try:
        if request["what"] == "submit":
            record = daemon.submit(JobSpec(**request["spec"]), request["key"])
            return {"number": record.number}
        records = daemon.store.jobs(0, 1_000_000)
        jobs = [[one.number, one.spec.name, one.status, one.failures] for one in records]
        return {"jobs": jobs, "trouble": daemon.trouble}
    except HocketError as error:
        return {"error": str(error)}


def tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    folder = Path(sys.argv[1])
    try:
        store = Store.open(folder)
    except HocketError as error:
        sys.exit(f"{error}\nexit {error.exit_code}")
    daemon = Daemon(
        store, LocalExecutor(folder / "attempts", DEVICES), RULES, ("v100",), poll_s=0.1
    )
    daemon.start()
    tell({"cpu_s": time.process_time()})
    for line in sys.stdin:
        tell(answer(daemon, json.loads(line)))
    daemon.close()
    store.close()


if __name__ == "__main__":
    main()
