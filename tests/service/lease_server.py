"""A stand-in for the daemon: takes reports and checkpoints of one attempt, and can be told to
refuse, to be away, or to ask the attempt to leave."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hocket.service.lease import lease


class LeaseServer:
    """What came in, and how it is answered."""

    def __init__(self, port: int = 0, *, token: str = "t0k3n", current: tuple[int, int] = (7, 2)):
        self.reports: list[dict] = []
        self.checkpoints: list[dict] = []
        self.refused: list[str] = []
        self.token = token
        self.current = current
        """The attempt that holds the job; others are stale."""
        self.may_run = True
        self.failure: int | None = None
        self.is_stranger = False
        """Whether it is another program that listens where the daemon did."""
        self.served = 0
        self._answering = threading.Lock()
        handler = type("Handler", (_Handler,), {"story": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def variables(self, attempt: int = 2) -> dict[str, str]:
        return {
            "HOCKET_URL": self.url,
            "HOCKET_JOB": "7",
            "HOCKET_ATTEMPT": str(attempt),
            "HOCKET_TOKEN": self.token,
        }

    def give_away(self, current: tuple[int, int]) -> tuple[int, int]:
        """Let another attempt hold the job; how many reports and checkpoints were taken before."""
        with self._answering:
            self.current = current
            return len(self.reports), len(self.checkpoints)

    def answer(self, path: str, authorization: str, body: dict) -> tuple[int, dict]:
        with self._answering:
            return self._answer(path, authorization, body)

    def _answer(self, path: str, authorization: str, body: dict) -> tuple[int, dict]:
        self.served += 1
        if self.failure is not None:
            return self.failure, self._problem(self.failure, "as the test says")
        _, version, jobs, job, attempts, attempt, what = path.split("/")
        assert (version, jobs, attempts) == ("v1", "jobs", "attempts")
        if (int(job), int(attempt)) != self.current or authorization != f"Bearer {self.token}":
            self.refused.append(what)
            return 409, self._problem(409, "stale")
        if what == "checkpoints":
            self.checkpoints.append(body)
            return 201, body
        self.reports.append(body)
        return 200, {"may_run": self.may_run, "stop_by_s": None, "attempt": int(attempt)}

    def _problem(self, status: int, detail: str) -> dict:
        if self.is_stranger:
            return {"detail": detail}
        return {"status": status, "code": "as-the-test-says", "detail": detail}


class _Handler(BaseHTTPRequestHandler):
    story: LeaseServer

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = self.story.answer(self.path, self.headers["Authorization"], body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class Saves:
    """A save function that takes note."""

    def __init__(self):
        self.steps = []

    def __call__(self, step):
        self.steps.append(step)
        return f"step-{step}"


def leaves(saves, ask, *, start=0, **options):
    done = []
    try:
        for step in lease(save=saves, **options).steps(start, 1000):
            done.append(step)
            ask(step)
    except SystemExit as leaving:
        return done, leaving.code
    raise AssertionError("it did not leave")
