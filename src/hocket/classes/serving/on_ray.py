"""The parts as an application of Ray Serve: a deployment for each part, and one that asks them all.

For clusters that run Ray anyway: parts may be on any of its machines and Ray restarts them. A call
between deployments takes milliseconds where `front_end` takes tenths of one, so this is no way to
answer soonest. The answer is given as soon as every class has its copies, as there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import HocketError, MissingExtraError, RunError
from hocket.classes.artefact import Folder
from hocket.classes.serving.app import answer_body, inputs_of, max_body_bytes
from hocket.classes.serving.front_end import Answer, ServeOptions, answer_from, is_enough
from hocket.classes.serving.wire import InputLayout
from hocket.classes.session import infer, open_session
from hocket.classes.table import PartTable
from hocket.service.credentials import bearer
from hocket.service.rest.problems import RefusedError

NAME = "hocket-classes"


class RayPart:
    """One part in an actor of Ray."""

    def __init__(self, model: bytes) -> None:
        self._session = open_session(model)

    def __call__(self, inputs: np.ndarray[Any, Any]) -> FloatArray:
        """Its scores for one input."""
        scores: FloatArray = infer(self._session, inputs)[0]
        return scores


class RayFrontEnd:
    """Asks all parts; ``parts`` have ``remote``, whose results can be awaited."""

    def __init__(
        self, table: dict[str, Any], options: ServeOptions, token: str, *parts: Any
    ) -> None:
        self._table, self._options, self._token = PartTable.from_data(table), options, token
        self._combiner = self._table.combiner()
        self._layout = InputLayout(self._table.input_shape, self._table.input_dtype)
        self._parts = parts

    async def predict(self, inputs: np.ndarray[Any, Any]) -> Answer:
        """The answer to one input."""
        start_ns = time.perf_counter_ns()
        checked = self._layout.checked(inputs)
        running = {
            asyncio.ensure_future(_result(part.remote(checked))): index
            for index, part in enumerate(self._parts)
        }
        answers: list[FloatArray | None] = [None] * len(self._parts)
        senseless, left = 0, set(running)
        until_s = time.monotonic() + self._options.deadline_s
        quorum = self._options.quorum or self._table.quorum
        while not is_enough(self._table, quorum, answers, {running[each] for each in left}):
            done, left = await asyncio.wait(
                left, timeout=until_s - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            for each in done:
                outputs = each.result()
                is_sound = outputs is not None and bool(np.isfinite(outputs).all())
                answers[running[each]] = outputs if is_sound else None
                senseless += outputs is not None and not is_sound
        for each in left:
            each.cancel()
        return answer_from(self._combiner, answers, senseless, start_ns)

    async def _body(self, request: Any) -> bytes:
        """What was sent, if it is no more than an input can be."""
        limit, body = max_body_bytes(self._table), b""
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise RefusedError(413, f"more than {limit:,} bytes",
                                   hint="send one input at a time")  # fmt: skip
        return body

    async def __call__(self, request: Any) -> Any:
        """``POST`` an input as the web service of `app` takes it."""
        from starlette.responses import JSONResponse

        if not hmac.compare_digest(
            bearer(request.headers.get("authorization", "")).encode(), self._token.encode()
        ):
            return JSONResponse({"detail": "this needs the token"}, 401)
        try:
            if request.method != "POST":
                raise RefusedError(405, "send an input by POST")
            body = await self._body(request)
            answer = await self.predict(inputs_of(body, request, self._table))
            if answer.label < 0:
                return JSONResponse({"detail": "no part gave finite scores in time"}, 503)
        except HocketError as error:
            status = error.status if isinstance(error, RefusedError) else 422
            return JSONResponse({"detail": error.message, "hint": error.hint}, status)
        return answer_body(answer, self._table.class_names, 5).model_dump()


async def _result(reference: Any) -> FloatArray | None:
    """What a part said; None where it died."""
    try:
        return np.asarray(await reference, dtype=float)
    except Exception:
        return None


def application(folder: Folder, options: ServeOptions, token: str, cores: float) -> Any:
    """What ``ray.serve.run`` takes, for a cluster of so many cores."""
    serve = _ray_serve()
    # Ray would wait for ever for a part that has no room.
    share = min(1.0, int(100 * cores / len(folder.models)) / 100)
    parts = [
        serve.deployment(name=f"part-{index}", ray_actor_options={"num_cpus": share})(RayPart).bind(
            model
        )
        for index, model in enumerate(folder.models)
    ]
    front = serve.deployment(
        name="front-end", max_ongoing_requests=64, ray_actor_options={"num_cpus": 0}
    )(RayFrontEnd)
    return front.bind(folder.table.to_data(), options, token, *parts)


def _ray_serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:
        raise MissingExtraError(
            f"hocket serve-classes --ray needs Ray Serve: {error.msg}",
            hint="pip install 'ray[serve]'",
        ) from None
    return serve


def _join_ray(ray: Any) -> None:
    """The cluster that this machine is part of, or one of its own."""
    try:
        with contextlib.suppress(ConnectionError):
            ray.init(address="auto", log_to_driver=False)
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False)
    except Exception as error:
        raise RunError(
            f"Ray did not start: {str(error).partition('. ')[0]}",
            hint="ray status says what is wrong; a busy machine needs longer",
        ) from error


def serve_on_ray(
    folder: Folder,
    options: ServeOptions,
    *,
    host: str,
    port: int,
    token: str,
    on_ready: Callable[[str], None],
) -> None:
    """Serve a folder on the Ray cluster of this machine, or a Ray of its own, until told to end."""
    serve = _ray_serve()
    import ray

    _join_ray(ray)
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        serve.start(http_options={"host": host, "port": port})
        cores = ray.cluster_resources().get("CPU", 1.0)  # type: ignore[no-untyped-call]
        made = application(folder, options, token, cores)
        serve.run(made, name=NAME, route_prefix="/v1/predict")
        shown = f"[{host}]" if ":" in host else host
        on_ready(f"http://{shown}:{port}")
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        with contextlib.suppress(Exception):
            serve.delete(NAME)
        ray.shutdown()
