"""The web service: one input in, classes with their probabilities out.

An input is sent as JSON (``{"input": [...]}``) or as raw bytes (``application/octet-stream``,
little-endian, row-major). Faulty inputs are rejected before they reach a worker. Requests wait in
one queue; when it is full, further requests are refused at once.
"""

from __future__ import annotations

import hmac
from asyncio import get_running_loop
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated, Any

import numpy as np
from fastapi import FastAPI, Query, Request
from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from hocket import __version__
from hocket.base.errors import InputFileError, UsageError
from hocket.base.jsonfile import parse_json
from hocket.base.units import format_seconds
from hocket.classes.serving.front_end import Answer, FrontEnd
from hocket.classes.serving.link import MAX_PAUSE_S
from hocket.classes.table import PartTable
from hocket.service.credentials import bearer
from hocket.service.rest.middleware import RequestMiddleware, misleading
from hocket.service.rest.problems import RefusedError, answers, handle_errors, problem

# Every request passes these checks: host name, token, size. They are those of the fleet's service,
# with one token instead of many holders.

_OPEN = ("/healthz",)


class Door(RequestMiddleware):
    """ASGI middleware: refuses a request, or reads its body and passes it on."""

    def __init__(self, app: ASGIApp, token: str, max_bytes: int, hosts: tuple[str, ...]) -> None:
        super().__init__(app, hosts)
        self._token, self.max_bytes = token, max_bytes

    def refusal(self, scope: Scope) -> Response | None:
        """Return the response to a wrong host name or token; None if the request is allowed."""
        headers = Headers(scope=scope)
        refusal = misleading(headers, self.hosts, "use 127.0.0.1")
        if refusal is not None:
            return refusal
        given = bearer(headers.get("authorization", ""))
        if scope["path"] in _OPEN or hmac.compare_digest(given.encode(), self._token.encode()):
            return None
        challenge = {"www-authenticate": 'Bearer realm="hocket classes"'}
        return problem(401, "this needs the token", headers=challenge,
                       hint="send Authorization: Bearer with the token of the service")  # fmt: skip


MAX_WAITING = 64
MAX_DEADLINE_S = 60.0
_LEAST_BODY_BYTES = 65_536
_JSON_BYTES_PER_NUMBER = 40
_RAW = "application/octet-stream"


class ClassBody(BaseModel):
    """One class with its probability."""

    name: str
    index: int
    probability: float


class PredictBody(BaseModel):
    """An answer."""

    label: str
    index: int
    classes: list[ClassBody] = Field(description="Most probable first")
    missing: list[str] = Field(description="Classes that no part answered for")
    parts: int = Field(description="Parts that answered in time")
    took_s: float


class ModelBody(BaseModel):
    """The model that is served."""

    classes: list[str]
    input_shape: list[int]
    input_dtype: str
    parts: list[list[str]]
    redundancy: int


class PartsHealth(BaseModel):
    """True if every part has a worker."""

    status: str
    workers: int
    alive: int


def max_body_bytes(table: PartTable) -> int:
    """Most bytes of one input, as JSON or raw."""
    numbers = int(np.prod(table.input_shape))
    return max(_LEAST_BODY_BYTES, _JSON_BYTES_PER_NUMBER * numbers)


def make_app(front_end: FrontEnd, token: str, hosts: tuple[str, ...] = ()) -> FastAPI:
    """Build the web service over a front end whose workers are running."""
    # One thread, because every request occupies all workers, so a second thread would only wait.
    line = ThreadPoolExecutor(1, "hocket-predict")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        line.shutdown(cancel_futures=True)

    app = FastAPI(title="hocket classes", version=__version__, docs_url=None, redoc_url=None,
                  redirect_slashes=False, lifespan=lifespan)  # fmt: skip
    names = front_end.table.class_names
    waiting = 0

    @app.post("/v1/predict", responses=answers(), openapi_extra={"requestBody": _body_schema()})
    async def predict(
        request: Request,
        top: Annotated[int, Query(ge=1, le=100_000)] = 5,
        deadline_s: Annotated[float | None, Query(gt=0, le=MAX_DEADLINE_S)] = None,
    ) -> PredictBody:
        """Classify one input."""
        nonlocal waiting
        if waiting >= MAX_WAITING:
            raise RefusedError(503, f"{waiting} requests are waiting", hint="ask again in a moment")
        # Checked before it waits: a faulty input must not delay others.
        inputs = front_end.checked(inputs_of(await request.body(), request, front_end.table))
        waiting += 1
        try:
            loop = get_running_loop()
            answer = await loop.run_in_executor(line, front_end.predict, inputs, deadline_s)
        finally:
            waiting -= 1
        if answer.label < 0 and answer.senseless:
            raise UsageError("the parts give no finite scores to this input",
                             hint="scale it as the inputs of the training were")  # fmt: skip
        if answer.label < 0:
            raise no_answer(len(front_end.table.parts), front_end.num_alive)
        return answer_body(answer, names, top)

    @app.get("/v1/model", responses=answers())
    async def model() -> ModelBody:
        """Description of the model served: classes, the form of an input, parts."""
        table = front_end.table
        parts = [[names[each] for each in part.classes] for part in table.parts]
        return ModelBody(classes=list(names), input_shape=list(table.input_shape), parts=parts,
                         input_dtype=table.input_dtype, redundancy=table.redundancy)  # fmt: skip

    @app.get("/v1/metrics", responses=answers())
    async def metrics() -> dict[str, Any]:
        """Times of answers and parts, late and dead workers."""
        return front_end.metrics().to_data()

    @app.get("/healthz", responses=answers())
    async def health() -> PartsHealth:
        """True if all parts can answer; open to all."""
        workers, alive = len(front_end.table.parts), front_end.num_alive
        status = "ok" if alive == workers else "degraded"
        return PartsHealth(status=status, workers=workers, alive=alive)

    handle_errors(app)
    app.add_middleware(Door, token=token, max_bytes=max_body_bytes(front_end.table), hosts=hosts)
    return app


def no_answer(workers: int, alive: int) -> RefusedError:
    """Error if no part has answered: its reason is dead workers, or that all are too slow."""
    if alive == workers:
        return RefusedError(503, "no part answered in time", hint="allow a longer deadline_s")
    return RefusedError(
        503,
        f"no part answered: {workers - alive} of {workers} workers are dead",
        hint="they are started again at once, after repeated deaths with pauses of up to "
        f"{format_seconds(MAX_PAUSE_S)}: ask again; GET /healthz says how many are alive",
    )


def _body_schema() -> dict[str, Any]:
    number_list = {"type": "array", "items": {}}
    body = {"type": "object", "properties": {"input": number_list}, "required": ["input"]}
    return {
        "required": True,
        "content": {
            "application/json": {"schema": body},
            _RAW: {"schema": {"type": "string", "format": "binary"}},
        },
    }


def inputs_of(body: bytes, request: Request, table: PartTable) -> np.ndarray[Any, Any]:
    """Return the array in a request; raises an error that names its fault."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == _RAW:
        dtype = np.dtype(table.input_dtype).newbyteorder("<")
        expected = int(np.prod(table.input_shape)) * dtype.itemsize
        if len(body) != expected:
            raise UsageError(f"the body has {len(body)} bytes", hint=f"expected {expected}")
        return np.frombuffer(body, dtype).reshape(table.input_shape)
    if kind != "application/json":
        raise RefusedError(415, "the body must be JSON or raw bytes",
                           hint=f"send Content-Type: application/json or {_RAW}")  # fmt: skip
    try:
        sent = parse_json(body, "body")
    except InputFileError as error:
        raise RefusedError(400, f"the body is no JSON: {error.message}") from None
    if not isinstance(sent, dict) or set(sent) != {"input"}:
        raise UsageError("the body has not the one key 'input'", hint='send {"input": [...]}')
    try:
        given = np.array(sent["input"])
    except (ValueError, TypeError, OverflowError):
        given = np.array(None)
    # Quoted numbers, booleans and null are mistakes, although numpy would accept them.
    if given.dtype.kind not in "iuf":
        raise UsageError(
            "the input is no array of numbers",
            hint=f"expected lists of the shape {table.input_shape}",
        )
    return given


def answer_body(answer: Answer, names: tuple[str, ...], top: int) -> PredictBody:
    """Convert an answer to the response body with its ``top`` most probable classes."""
    shares = answer.probabilities
    # Ordered by scores, because probabilities that are equal in their last bit must not hide the
    # label.
    best = np.argsort(-answer.scores, kind="stable")[:top]
    return PredictBody(
        label=names[answer.label],
        index=answer.label,
        classes=[
            ClassBody(name=names[each], index=int(each), probability=float(shares[each]))
            for each in best
        ],
        missing=[names[each] for each in answer.missing],
        parts=answer.came,
        took_s=answer.took_s,
    )
