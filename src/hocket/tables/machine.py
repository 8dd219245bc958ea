"""The shards of one machine as processes: started, watched, and started again when one dies.

A shard that died comes back at its address with its last checkpoint; clients find it by
themselves and send what it lacks. One that dies again and again is given up, by name.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from hocket.base.errors import RunError
from hocket.processes.worker import WorkerSpec
from hocket.processes.worker_group import Message, WorkerGroup
from hocket.tables.layout_file import layout_data
from hocket.tables.spec import Layout

_MAX_RESTARTS = 5
_HEALTHY_S = 60.0
"""Of one that has lived so long, earlier deaths are forgotten."""
_START_S = _END_S = 60.0
_log = logging.getLogger("hocket.tables")


class ShardProcesses:
    """A process for each shard; use it in a ``with`` statement, then connect to `addresses`."""

    def __init__(
        self,
        layout: Layout,
        *,
        address: str = "tcp://127.0.0.1:0",
        checkpoints: Path | None = None,
        checkpoint_s: float = 30.0,
    ) -> None:
        self.layout, self.checkpoints, self.checkpoint_s = layout, checkpoints, checkpoint_s
        self.addresses = [address] * layout.num_shards
        self.num_restarts = [0] * layout.num_shards
        self._groups: list[WorkerGroup] = []
        self._closing = False
        self._watchers: list[threading.Thread] = []

    def __enter__(self) -> ShardProcesses:
        try:
            for shard in range(self.layout.num_shards):
                self._groups.append(self._started(shard))
        except BaseException:
            self.close()
            raise
        for shard in range(self.layout.num_shards):
            watcher = threading.Thread(target=self._watch, args=(shard,), daemon=True)
            self._watchers.append(watcher)
            watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int | None]:
        """The processes of the shards; None for one that is being started again."""
        return [next(iter(group.process_ids), None) for group in self._groups]

    def close(self) -> None:
        """End all shards; each writes what its checkpoint lacks."""
        self._closing = True
        for watcher in self._watchers:
            watcher.join()
        try:
            running = [
                (shard, group) for shard, group in enumerate(self._groups) if group.process_ids
            ]
            for _, group in running:
                group.send(0, {"what": "end"})
            for shard, group in running:
                self._await_end(shard, group)
        finally:
            for group in self._groups:
                group.close()

    def _await_end(self, shard: int, group: WorkerGroup) -> None:
        try:
            while (said := group.receive(_END_S)) is not None:
                self._pass_on(said)
        except RunError as error:
            _log.error("shard %d: its last changes are in no checkpoint: %s", shard, error.message)

    def _pass_on(self, said: Message | None) -> None:
        if said is not None and said.header.get("what") == "warning":
            _log.warning("%s", said.header["message"])

    def _started(self, shard: int) -> WorkerGroup:
        path = None if self.checkpoints is None else self.checkpoints / f"shard-{shard}.npz"
        group = WorkerGroup(
            [WorkerSpec(name=f"shard {shard}", module="hocket.tables.shard_process")]
        )
        group.__enter__()
        try:
            group.send(0, {
                "layout": layout_data(self.layout), "shard": shard,
                "address": self.addresses[shard], "checkpoint": str(path) if path else "",
                "checkpoint_s": self.checkpoint_s,
            })  # fmt: skip
            said = group.receive(_START_S)
            if said is None:
                raise RunError(f"shard {shard} did not start within {_START_S:g} s")
            self.addresses[shard] = said.header["address"]
        except BaseException:
            group.close()
            raise
        return group

    def _watch(self, shard: int) -> None:
        """Start a shard again whenever it dies."""
        num_in_a_row, started_s = 0, time.monotonic()
        while not self._closing:
            try:
                self._pass_on(self._groups[shard].receive(0.2))
            except RunError as error:
                if self._closing:
                    return
                if time.monotonic() - started_s > _HEALTHY_S:
                    num_in_a_row = 0
                if num_in_a_row == _MAX_RESTARTS:
                    _log.error("%s: given up after %d restarts", error.message, _MAX_RESTARTS)
                    return
                _log.warning("%s: started again from its checkpoint", error.message)
                num_in_a_row += 1
                self._restart(shard)
                started_s = time.monotonic()

    def _restart(self, shard: int) -> None:
        self._groups[shard].close()
        self.num_restarts[shard] += 1
        try:
            self._groups[shard] = self._started(shard)
        except RunError as error:
            # Clients that wait for it say so too; the next look tries again.
            _log.error("shard %d could not be started again: %s", shard, error.message)
