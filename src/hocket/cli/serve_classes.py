"""``hocket serve-classes``: serve a folder of ``hocket split`` over HTTP, or predict its
latency."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from hocket.cli.declare import argument, declare, option
from hocket.cli.options import DURATION
from hocket.cli.output import emit, say

if TYPE_CHECKING:
    from hocket.classes.artefact import Folder
    from hocket.classes.serving.dry_run import LatencyForecast
    from hocket.classes.serving.front_end import ServeOptions


def _options(deadline_s: float, spin_s: float, quorum: int | None) -> ServeOptions:
    from hocket.base.errors import UsageError
    from hocket.base.units import format_seconds
    from hocket.classes.serving.app import MAX_DEADLINE_S
    from hocket.classes.serving.front_end import ServeOptions

    if not 0 < deadline_s <= MAX_DEADLINE_S:
        raise UsageError(
            f"--deadline {deadline_s:g}s is no time that a request may take",
            hint=f"more than nothing, {format_seconds(MAX_DEADLINE_S)} at most",
        )
    return ServeOptions(deadline_s=deadline_s, spin_s=spin_s, quorum=quorum)


def _require_workers(opened: Folder, options: ServeOptions) -> None:
    """Refuse a quorum above the redundancy, and spinning workers without a core for each."""
    from hocket.base.errors import UsageError

    if options.quorum is not None and options.quorum > opened.table.redundancy:
        raise UsageError(
            f"--quorum {options.quorum} cannot be waited for: each class is on "
            f"{opened.table.redundancy} workers",
            hint="split with more --redundancy",
        )
    workers, cores = len(opened.table.parts), len(os.sched_getaffinity(0))
    # The front end needs a core of its own beside the spinning workers.
    if options.spin_s and cores <= workers:
        raise UsageError(
            f"{workers} workers that spin and the front end need {workers + 1} cores, and there "
            f"are {cores}: answers would wait for cores that are kept awake",
            hint="leave out --spin",
        )


@declare("serve-classes")
def command(
    *,
    folder: Annotated[Path, argument()],
    host: Annotated[str, "Address to listen on."] = "127.0.0.1",
    port: Annotated[
        int, option("Port to listen on; 0 for a free one.", type=click.IntRange(0, 65535))
    ] = 0,
    token_file: Annotated[Path | None, "Holds the token; made where it is not there."] = None,
    deadline_s: Annotated[
        float, option("Longest time of one answer.", "--deadline", type=DURATION)
    ] = 1.0,
    spin_s: Annotated[
        float,
        option(
            "Time for which an idle worker keeps its core awake, such as 2ms.",
            "--spin",
            type=DURATION,
        ),
    ] = 0.0,
    quorum: Annotated[
        int | None,
        option(
            "Answers per class that are waited for; default: all copies.", type=click.IntRange(1)
        ),
    ] = None,
    only_predict: Annotated[
        bool, option("Say how long an answer will take on this machine, and end.", "--predict")
    ] = False,
    as_json: bool,
) -> None:
    """Serve the sub-models in FOLDER: one worker process each, HTTP on a loopback address."""
    from hocket.base.extras import require
    from hocket.base.units import format_seconds

    for package in ("onnxruntime", "fastapi", "uvicorn"):
        require(package, "hocket serve-classes")
    from hocket.classes.artefact import read_folder
    from hocket.classes.serving.dry_run import forecast_by_dry_run

    options, opened = _options(deadline_s, spin_s, quorum), read_folder(folder)
    _require_workers(opened, options)
    prediction: dict[str, Any] | None = None

    def report(forecast: LatencyForecast) -> None:
        nonlocal prediction
        prediction = forecast.to_data()
        say(
            f"an answer will take about {format_seconds(forecast.answer_s)} on {forecast.cores} "
            f"cores: {format_seconds(max(forecast.part_s))} for the slowest sub-model, "
            f"{format_seconds(forecast.overhead_s)} to reach {len(forecast.part_s)} workers"
        )

    if only_predict:
        report(forecast_by_dry_run(opened, options))
        if as_json and prediction is not None:
            emit(prediction)
        return
    from hocket.classes.serving.serve import serve, token_in

    token = token_in(token_file)

    def tell(url: str) -> None:
        if as_json:
            emit({"url": url, "token": token, "prediction": prediction})
        else:
            click.echo(url)
            say(f"token: {token_file or token}; POST {url}/v1/predict; Ctrl-C ends it")

    serve(opened, options, host=host, port=port, token=token, on_ready=tell,
          on_forecast=report)  # fmt: skip
