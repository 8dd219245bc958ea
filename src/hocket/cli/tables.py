"""``hocket tables``: serve a shard of parameter tables; check the protocol by random schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click

from hocket.cli.declare import argument, declare, option
from hocket.cli.options import FiniteRange
from hocket.cli.output import answer, emit, say


@click.group("tables")
def command() -> None:
    """Rows shared under bounded staleness: serve a shard, check the protocol."""


@declare("serve", command)
def serve(
    *,
    file: Annotated[Path, argument("TABLES.toml")],
    shard: Annotated[int, option("Index of this shard in the layout.", type=click.IntRange(0))] = 0,
    at: Annotated[str, option("tcp://*:4000 or ipc:///path.", metavar="ADDRESS")],
    checkpoint: Annotated[
        Path | None, "Read at the start if it is there, written now and then and at the end."
    ] = None,
    every: Annotated[float, option("Seconds between two checkpoints.", type=FiniteRange(0))] = 30.0,
    as_json: bool,
) -> None:
    """Serve one shard of the tables in TABLES.toml until SIGINT or SIGTERM."""
    import signal
    import threading

    from hocket.base.errors import UsageError
    from hocket.tables.address import shard_port
    from hocket.tables.layout_file import read_layout
    from hocket.tables.server import ShardServer

    layout = read_layout(file)
    if shard >= layout.num_shards:
        raise UsageError(
            f"there is no shard {shard}",
            hint=f"{file} has {layout.num_shards}, counted from 0",
            where="--shard",
        )
    port = shard_port(layout, shard, at)
    try:
        server = ShardServer(layout, shard, port, checkpoint=checkpoint, checkpoint_s=every)
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        if as_json:
            emit({"shard": shard, "shards": layout.num_shards, "address": port.address})
        else:
            say(f"shard {shard} of {layout.num_shards} serves at {port.address}")
        try:
            server.run(stop)
        finally:
            server.close()
    finally:
        port.close()


@declare("check", command)
def check(
    *,
    schedules: Annotated[int, option("Number of schedules.", type=click.IntRange(1))] = 10_000,
    seed: Annotated[int, "Seed of the schedules."] = 0,
    as_json: bool,
) -> None:
    """Run the protocol in random schedules, with shards that die, and check every read."""
    from hocket.tables.check import arrangements, check_schedules

    num = check_schedules(schedules, seed)
    answer(
        as_json,
        {"schedules": num, "arrangements": len(arrangements()), "faults": 0},
        f"{num} random schedules in {len(arrangements())} arrangements: every read held all "
        "changes that its staleness asks for and all of its own, none twice, and none was lost",
    )
