"""Submissions over HTTP to a fleet with many live jobs: time from asking to the durable answer.

    python benchmarks/fleet/submit.py [--jobs 2048] [--requests 400] [--curious 4]

The service runs in this process with a pretended engine and rounds of 2 s, the client in another;
one job ends for each that comes. CPU is that of the service's process per request and includes its
rounds; where other programs use the machine, wall times say little (see the load that is printed).
With ``--curious``, so many others load explanations, what-ifs and the page again and again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import under_load
import uvicorn

from hocket.service.forecasts.process import ForecastProcess
from hocket.service.rest.app import make_app
from hocket.service.serve import SWITCH_S, listening_socket, server_config
from hocket.service.tokens import Tokens

PAUSE_S = 0.02
CLIENT = """
import http.client, json, sys, time
port, token, num, pause_s = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
connection = http.client.HTTPConnection("127.0.0.1", port)
headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
for at, line in zip(range(num), sys.stdin):
    start_s = time.perf_counter()
    connection.request("POST", "/v1/jobs", line.strip(), {**headers, "Idempotency-Key": f"k{at}"})
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 201, answer.status
    print(1e3 * (time.perf_counter() - start_s), flush=True)
    time.sleep(pause_s)
"""

CURIOUS = """
import http.client, sys, threading, time, collections
port, token, num = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
questions = (
    ("GET", "/v1/jobs/{}/explain", None), ("GET", "/what-if?policy=fifo", None),
    ("POST", "/v1/simulate", b'{"policy": "fifo"}'), ("GET", "/", None),
)
counts = collections.Counter()
def ask(at):
    while True:
        method, path, body = questions[at % len(questions)]
        at += 1
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request(method, path.format(1200 + at % 500), body, headers)
            answer = connection.getresponse()
            answer.read()
            counts[path.partition("?")[0], answer.status] += 1
            connection.close()
        except OSError:
            return
threads = [threading.Thread(target=ask, args=(at,), daemon=True) for at in range(num)]
for thread in threads: thread.start()
sys.stdin.read()
for (path, status), count in sorted(counts.items()): print(f"  {path} answered {status}: {count}")
"""


def measure(folder: Path, num_jobs: int, num_requests: int, num_curious: int) -> None:
    store, daemon, executor = under_load.filled(folder, num_jobs, 2.0)
    listener = listening_socket("127.0.0.1", 0)
    forecaster = ForecastProcess()
    tokens = Tokens()
    token = tokens.add("benchmark", role="admin")
    server = uvicorn.Server(server_config(make_app(daemon, tokens, forecaster=forecaster)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    random = np.random.default_rng(1)
    bodies = [under_load.make_spec(random).model_dump_json() for _ in range(num_requests)]
    arguments = [str(listener.getsockname()[1]), token, str(num_requests), str(PAUSE_S)]
    curious = subprocess.Popen(
        [sys.executable, "-c", CURIOUS, arguments[0], token, str(num_curious)],
        stdin=subprocess.PIPE,
    )
    time.sleep(5.0 if num_curious else 0.0)
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write("\n".join(bodies) + "\n")
    client.stdin.close()
    cpu_s, first_round = time.process_time(), daemon.state.round_number
    waits_ms = []
    for line in client.stdout:
        waits_ms.append(float(line))
        for name in executor.running()[:1]:
            executor.exit(name, 0)
    cpu_ms = 1e3 * (time.process_time() - cpu_s) / num_requests
    client.wait()
    curious.communicate()
    under_load.report_waits("over HTTP, one after the other", waits_ms)
    rounds = daemon.state.round_number - first_round
    print(
        f"{len(daemon.service_state.jobs)} live jobs, {len(waits_ms)} requests, {rounds} rounds; "
        f"{cpu_ms:.1f} ms CPU per request with rounds and ends of jobs; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    server.should_exit = True
    thread.join()
    forecaster.close()
    daemon.close()
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--curious", type=int, default=0)
    arguments = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    with tempfile.TemporaryDirectory(prefix="fleet-submit-") as folder:
        measure(Path(folder), arguments.jobs, arguments.requests, arguments.curious)


if __name__ == "__main__":
    main()
