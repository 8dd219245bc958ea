"""``hocket ui``: a local page that predicts if a model trains on given GPUs, and how fast.

An HTTP server of the standard library. The page requests ``/answer`` with the values of its form.
``/plan.json`` and ``/report.html`` take the same query and are downloads, so the address of the
page is a link to its state. Models are taken by name or from graph files and never imported from
Python files. A foreign web page that finds the port can therefore only make it plan. Requests from
other sites and for other host names are refused.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import click

from hocket.base.errors import HocketError, UsageError
from hocket.cli.declare import declare, option
from hocket.cli.options import ModelOn, ModelOptions
from hocket.cli.output import emit, say
from hocket.cli.sources import load_graph, make_problem

if TYPE_CHECKING:
    from hocket.api.planned import Planned
    from hocket.planners.memory.budget import BudgetFit

LOOPBACK = "127.0.0.1"
_NUM_KEPT = 32
_FIELDS = ("model", "on", "batch", "seq", "amp", "memory")
_GRAPH_FILE = re.compile(r"\.json(\.gz)?$")
Query = tuple[tuple[str, str], ...]
"""Non-empty values of the form, in the order of `_FIELDS`; hashable, to be a cache key."""


@declare("ui")
def command(
    *,
    port: Annotated[
        int, option("Port to listen on; 0 takes a free one.", type=click.IntRange(0, 65535))
    ] = 8420,
    host: Annotated[str, "Address to listen on."] = LOOPBACK,
    as_json: bool,
) -> None:
    """Serve a page on this machine: pick a model and GPUs, see if and how fast it trains.

    It shows the strategies with step time, tokens/s and peak memory, the memory curve, and step
    time against memory budget. Plan, report and launch command can be downloaded. Ctrl-C ends it.
    """
    from hocket.base.extras import require

    require("torch", "the page captures models, which")
    try:
        server = make_server(host, port)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror}", hint="name another --port"
        ) from None
    address = f"http://{host}:{server.server_address[1]}/"
    if as_json:
        emit({"address": address})
    else:
        say(f"hocket ui: {address} (Ctrl-C ends it)")
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


def make_server(host: str, port: int) -> ThreadingHTTPServer:
    """Create the server; it listens already."""
    return ThreadingHTTPServer((host, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Answer with the page, the result of a query, or a file."""
        url = urlsplit(self.path)
        if not self._is_own():
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"only for the page of hocket ui\n")
            return
        routes: dict[str, Callable[[Query], tuple[str, bytes]]] = {
            "/": _page,
            "/answer": _answer,
            "/plan.json": _plan_file,
            "/report.html": _report_file,
        }
        if url.path not in routes:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")
            return
        given = dict(parse_qsl(url.query))
        query = tuple((key, given[key].strip()) for key in _FIELDS if given.get(key, "").strip())
        try:
            kind, body = routes[url.path](query)
        except HocketError as error:
            body = json.dumps({"error": error.message, "hint": error.hint}).encode()
            self._send(HTTPStatus.UNPROCESSABLE_ENTITY, "application/json", body)
            return
        self._send(HTTPStatus.OK, kind, body)

    def _is_own(self) -> bool:
        """True for requests of the page itself and of a user who typed its address."""
        # A foreign host name that resolves to 127.0.0.1 is a DNS-rebinding attack; browsers still
        # send that name as Host.
        name = self.headers.get("Host", "").rpartition(":")[0]
        site = self.headers.get("Sec-Fetch-Site", "none")
        assert isinstance(self.server, ThreadingHTTPServer)
        bound = self.server.socket.getsockname()[0]
        is_local = bound != LOOPBACK or name in {LOOPBACK, "localhost"}
        # Links from other sites may open the page itself, which plans nothing.
        return is_local and (site in {"none", "same-origin"} or urlsplit(self.path).path == "/")

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        # The browser has closed the connection, such as after a reload.
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Discard the access log."""


# ── answers ──────────────────────────────────────────────────────────────────────────────────────

_PLANNING = threading.Lock()
"""Held while planning: capture replaces tensors of modules and is not thread-safe."""


@lru_cache(maxsize=_NUM_KEPT)
def _solved(query: Query) -> BudgetFit | Planned:
    """Solve a query: a memory budget on one GPU, or the best strategy on several. Cached."""
    from hocket.api.memory import fit_problem
    from hocket.api.planned import best_of
    from hocket.api.planners import compare_candidates
    from hocket.capture import ZOO
    from hocket.plan.make import find_cluster
    from hocket.planners.memory.given_budget import budget_of
    from hocket.transformer.hf_cache import PREFIX

    given = dict(query)
    model, on = given.get("model", ""), given.get("on", "")
    if model not in ZOO and not model.startswith(PREFIX) and not _GRAPH_FILE.search(model):
        raise UsageError(
            f"{model!r} is no model of hocket list models and no graph file",
            hint="capture your own model with hocket capture FILE.py:FUNCTION -o graph.json.gz",
        )
    cluster = find_cluster(on)
    is_one = cluster.num_devices == 1
    is_file = bool(_GRAPH_FILE.search(model))
    if is_file:  # a graph has its sizes
        given = {key: value for key, value in given.items() if key not in {"batch", "seq", "amp"}}
    options = ModelOptions(
        batch=_number(given, "batch"),
        seq=_number(given, "seq"),
        dtype=None,
        optimizer=None,
        amp=given.get("amp"),
    )
    graph, _ = load_graph(model, options, at_sizes=not is_one)
    problem = make_problem(graph, ModelOn(source=model, on=on, options=options))
    if is_one:
        memory = given.get("memory")
        return fit_problem(problem, None if memory is None else budget_of(memory))
    return best_of(compare_candidates(problem))


def _number(given: Mapping[str, str], key: str) -> int | None:
    text = given.get(key)
    if text is None:
        return None
    if not text.isdecimal() or not 0 < int(text) <= 2**20:
        raise UsageError(f"{key} must be a whole number from 1 to {2**20:,}, not {text!r}")
    return int(text)


def _locked(query: Query) -> BudgetFit | Planned:
    with _PLANNING:
        return _solved(query)


def _answer(query: Query) -> tuple[str, bytes]:
    """Sections of the report as HTML, and peak memory and step time of each budget as numbers."""
    from hocket.api.planned import Planned
    from hocket.view import fit_report

    found = _locked(query)
    given = dict(query)
    words = " ".join(
        f"--{key} {given[key]}" for key in ("batch", "seq", "amp", "on", "memory") if key in given
    )
    if isinstance(found, Planned):
        html = found.summary_html()
        name, budgets, then = "plan", [], "hocket launch plan.json train.py"
    else:
        html = fit_report.summary_html(found)
        name, then = "fit", "hocket.prepare(model, optimizer, batch, memory=…)"
        budgets = sorted((plan.peak_bytes, plan.step_s) for plan in found.frontier.best_of())
    answer = {
        "html": html, "budgets": budgets, "command": f"hocket {name} {given['model']} {words}",
        "then": then, "fits": isinstance(found, Planned) or found.chosen is not None,
        "files": urlencode(query),
    }  # fmt: skip
    return "application/json", json.dumps(answer).encode()


def _plan_file(query: Query) -> tuple[str, bytes]:
    from hocket.api.planned import Planned
    from hocket.plan.files import plan_bytes

    found = _locked(query)
    if isinstance(found, Planned):
        return "application/json", plan_bytes("plan.json", found.problem, found.plan)
    return "application/json", plan_bytes("plan.json", found.frontier.problem, found.plan())


def _report_file(query: Query) -> tuple[str, bytes]:
    from hocket.api.planned import Planned
    from hocket.view.fit_report import fit_report_html

    found = _locked(query)
    page = found.report_html() if isinstance(found, Planned) else fit_report_html(found)
    return "text/html", page.encode()


def _page(_: Query) -> tuple[str, bytes]:
    from hocket.capture import ZOO
    from hocket.hardware.kinds import preset_kinds
    from hocket.hardware.shorthand import machine_names
    from hocket.view.page import fill, options_html, page_html, template

    form = fill(
        template("ui.html"),
        {
            "models": options_html(ZOO),
            "clusters": options_html((*preset_kinds(), *machine_names())),
        },
    )
    page = page_html(
        title="Does it train, and how fast?", body=(form,), js=template("ui.js"), connects=True,
        footer="Step times are predicted; every table names its 80 % range.",
    )  # fmt: skip
    return "text/html", page.encode()
