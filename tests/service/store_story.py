"""A story in commits for tests of the store, and all that a store tells."""

from __future__ import annotations

import shutil
from pathlib import Path

from service.fake_executor import fleet_devices

from hocket.fleet.rounds.state import FleetState, Rules, new_state
from hocket.service.records import (
    AttemptRecord,
    CheckpointRecord,
    EventRecord,
    JobRecord,
)
from hocket.service.spec import JobSpec
from hocket.service.store import Store
from hocket.service.store.snapshot import take_apart
from hocket.service.store.tables import Batch, KeyRecord

STATE = new_state(("v100", "k80"), fleet_devices(v100=2, k80=1), Rules(), time_s=100.0)


def job(number: int, **changes: object) -> JobRecord:
    spec = JobSpec(name=f"job {number}", command=("python", "train.py"), gang=number)
    values = {"number": number, "spec": spec, "status": "queued", "submitted_s": 1.5, **changes}
    return JobRecord(**values)  # type: ignore[arg-type]


def attempt(number: int, **changes: object) -> AttemptRecord:
    values: dict[str, object] = {
        "job": number, "attempt": 1, "devices": ("v100-0",), "device_type": "v100",
        "token": "secret", "decided_s": 2.5, **changes,
    }  # fmt: skip
    return AttemptRecord(**values)  # type: ignore[arg-type]


def batch(number: int) -> Batch:
    """The nth of a story: each submits a job, starts it and commits a checkpoint."""
    return Batch(
        state=STATE.but(time_s=100.0 + number),
        jobs=[job(number, status="running", devices=("v100-0",), done_steps=0.1 + number)],
        attempts=[attempt(number, started_s=3.25)],
        checkpoints=[CheckpointRecord(job=number, attempt=1, step=7.0, path="/c", committed_s=4.0)],
        events=[
            EventRecord(
                sequence=number,
                time_s=1.0,
                kind="submitted",
                job=number,
                detail={"name": "ä"},
            )
        ],
        keys=[KeyRecord(key=f"key-{number}", body_hash="00", job=number)],
        first_new_number=number,
    )


def packed(state: FleetState) -> list[bytes]:
    """A state as bytes, for comparisons."""
    head, arrays = take_apart(state)
    return [head, *(array.tobytes() for array in arrays)]


def content(store: Store) -> tuple[object, ...]:
    """All that a store tells."""
    loaded = store.load()
    state = None if loaded.state is None else packed(loaded.state)
    numbers = range(1, loaded.last_number + 1)
    return (
        state,
        loaded.jobs,
        loaded.attempts,
        loaded.checkpoints,
        (loaded.last_number, loaded.last_sequence),
        store.jobs(),
        [store.attempts(number) for number in numbers],
        [store.checkpoints(number) for number in numbers],
        store.events(),
        [store.key(f"key-{number}") for number in numbers],
    )


Story = tuple[Path, Path, tuple[object, ...]]


def tell_story(top: Path) -> Story:
    """A folder after four commits as a crash leaves it (with a log), one after a clean end, and
    what both hold."""
    store = Store.open(top / "live")
    for number in range(1, 4):
        store.commit(batch(number))
    store._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.commit(batch(4))
    held = content(store)
    shutil.copytree(top / "live", top / "crashed")
    store.close()
    return top / "crashed", top / "live", held


def read(folder: Path) -> tuple[object, ...]:
    store = Store.open(folder)
    try:
        return content(store)
    finally:
        store.close()
