"""Ray places the shards on the machines of a cluster and starts one again that dies; rows go by
ZeroMQ, past Ray.

Each shard is an actor that stays on the machine where it was first placed: it comes back at its
address, with the checkpoint that it wrote there. When the machine itself is lost, so are the
shard's address and, unless the folder is shared, its checkpoint; clients then say which shard is
silent.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

from hocket.base.extras import require
from hocket.tables.address import shard_port
from hocket.tables.layout_file import layout_data, layout_of
from hocket.tables.server import ShardServer
from hocket.tables.spec import Layout

_MAX_RESTARTS = 5
_MAX_TRIES, _TRY_S = 60, 0.5
_log = logging.getLogger("hocket.tables")


class ShardActor:
    """Shard that runs in a Ray worker."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    def start(self, layout: Any, shard: int, address: str, checkpoint: str, every_s: float) -> Any:
        """Bind and load; the address, and the machine that it is on."""
        import ray

        util: Any = ray.util  # not typed
        own = address or f"tcp://{util.get_node_ip_address()}:0"
        tables = layout_of(layout, "the tables")
        port = shard_port(tables, shard, own)
        path = Path(checkpoint) / f"shard-{shard}.npz" if checkpoint else None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self.server = ShardServer(tables, shard, port, checkpoint=path, checkpoint_s=every_s)
        return port.address, ray.get_runtime_context().get_node_id()

    def serve(self) -> None:
        """Serve until ended."""
        self.server.run(self.stop)
        self.server.close()

    def end(self) -> None:
        """End `serve`."""
        self.stop.set()


class RayShards:
    """The shards of a layout on the Ray cluster that this process is connected to."""

    def __init__(
        self, layout: Layout, *, checkpoints: Path | None = None, checkpoint_s: float = 30.0
    ) -> None:
        require("ray", "placing shards on a cluster")
        require("zmq", "tables across machines")
        self.layout, self.checkpoints, self.checkpoint_s = layout, checkpoints, checkpoint_s
        self.addresses = [""] * layout.num_shards
        self.num_restarts = [0] * layout.num_shards
        self.actors: list[Any] = [None] * layout.num_shards
        self._machines = [""] * layout.num_shards
        self._closing = False
        self._watchers: list[threading.Thread] = []

    def __enter__(self) -> RayShards:
        import ray

        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False)
        try:
            for shard in range(self.layout.num_shards):
                serving = self._start(shard)
                watcher = threading.Thread(target=self._watch, args=(shard, serving), daemon=True)
                self._watchers.append(watcher)
                watcher.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        self._closing = True
        for actor in self._running():
            actor.end.remote()
        for watcher in self._watchers:
            watcher.join(30)
        # A watcher may have started one again in the meantime.
        for actor in self._running():
            ray.kill(actor)

    def _running(self) -> list[Any]:
        return [actor for actor in self.actors if actor is not None]

    def _start(self, shard: int) -> Any:
        """Place a shard, on its machine if it has one; what ends when the shard does."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 2}
        if self._machines[shard]:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                self._machines[shard], soft=False
            )
        # Ray's own types are not typed.
        kind: Any = ray.remote(**options)(ShardActor)
        actor = self.actors[shard] = kind.remote()
        folder = "" if self.checkpoints is None else str(self.checkpoints)
        self.addresses[shard], self._machines[shard] = ray.get(
            actor.start.remote(
                layout_data(self.layout), shard, self.addresses[shard], folder, self.checkpoint_s
            )
        )
        return actor.serve.remote()

    def _watch(self, shard: int, serving: Any) -> None:
        import ray
        from ray.exceptions import RayError

        while not self._closing and serving is not None:
            try:
                ray.get(serving)
                return
            except RayError as error:
                if self._closing:
                    return
                if self.num_restarts[shard] == _MAX_RESTARTS:
                    _log.error("shard %d died %d times: given up", shard, _MAX_RESTARTS + 1)
                    return
                _log.warning("shard %d died (%s): started again", shard, type(error).__name__)
            self.num_restarts[shard] += 1
            serving = self._started_again(shard)

    def _started_again(self, shard: int) -> Any:
        """Ray reports a death before the process is gone: its address and file come free later."""
        import ray
        from ray.exceptions import RayError

        for _ in range(_MAX_TRIES):
            try:
                return self._start(shard)
            except RayError as error:
                ray.kill(self.actors[shard])
                failure = error
                if self._closing:
                    break
                time.sleep(_TRY_S)
        _log.error("shard %d could not be started again: %s", shard, failure)
        return None
