"""Roles: every route of the service for every role, on an own job and on another user's."""

from __future__ import annotations

import pytest
from service.rest_service import Service, is_problem

from hocket.base.errors import InputFileError
from hocket.service.errors import ForbiddenError
from hocket.service.server_config import read_server_config
from hocket.service.spec import JobSpec
from hocket.service.tokens import COOKIE_AGE_S, Holder, Tokens

pytestmark = pytest.mark.usefixtures("nobody_left")

JOB = {"name": "job", "command": ["sleep", "9"]}
ALL, OPEN, ADMIN, USER, OWN = "all", "open", "admin", "user", "own"
ATTEMPT, AGENT = "attempt", "agent"
# Who may use each route; a route that is missing here fails the test.
TABLE = {
    ("GET", "/"): ALL,
    ("GET", "/healthz"): OPEN,
    ("GET", "/jobs/{number}"): ALL,
    ("GET", "/live"): ALL,
    ("GET", "/login"): OPEN,
    ("GET", "/metrics"): ALL,
    ("GET", "/openapi.json"): OPEN,
    ("GET", "/readyz"): OPEN,
    ("GET", "/static/{name}"): OPEN,
    ("GET", "/v1/allocation"): ALL,
    ("GET", "/v1/devices"): ALL,
    ("GET", "/v1/events"): ALL,
    ("GET", "/v1/jobs"): ALL,
    ("GET", "/v1/jobs/{job}"): ALL,
    ("GET", "/v1/jobs/{job}/attempts"): ALL,
    ("GET", "/v1/jobs/{job}/checkpoints"): ALL,
    ("GET", "/v1/jobs/{job}/explain"): ALL,
    ("GET", "/v1/jobs/{job}/log"): ALL,
    ("GET", "/v1/tokens"): ALL,
    ("GET", "/v1/usage"): ALL,
    ("GET", "/what-if"): ALL,
    ("POST", "/login"): OPEN,
    ("POST", "/logout"): OPEN,
    ("POST", "/v1/simulate"): ALL,
    ("POST", "/v1/jobs"): USER,
    ("POST", "/v1/login-links"): USER,
    ("DELETE", "/v1/jobs/{job}"): OWN,
    ("POST", "/jobs/{number}/{change}"): OWN,
    ("POST", "/v1/jobs/{job}:pause"): OWN,
    ("POST", "/v1/jobs/{job}:resume"): OWN,
    ("DELETE", "/v1/tokens/{name}"): ADMIN,
    ("POST", "/v1/devices:drain"): ADMIN,
    ("POST", "/v1/devices:reopen"): ADMIN,
    ("POST", "/v1/tokens"): ADMIN,
    ("GET", "/v1/agents/{agent}/checkpoints/{job}"): AGENT,
    ("POST", "/v1/agents/{agent}/checkpoints/{job}"): AGENT,
    ("POST", "/v1/agents/{agent}/logs/{job}/{attempt}"): AGENT,
    ("POST", "/v1/agents/{agent}/sync"): AGENT,
    ("POST", "/v1/jobs/{job}/attempts/{attempt}/checkpoints"): ATTEMPT,
    ("POST", "/v1/jobs/{job}/attempts/{attempt}/report"): ATTEMPT,
}
STREAMS = {("GET", "/v1/events")}
"""Never end, so that the client of tests cannot ask for them."""
BODIES = {
    "/v1/jobs": JOB,
    "/v1/simulate": {},
    "/v1/devices:drain": {"name": "k80-0"},
    "/v1/devices:reopen": {"name": "k80-0"},
    "/v1/tokens": {"name": "x"},
    "/v1/jobs/{job}/attempts/{attempt}/report": {"done_steps": 1.0},
    "/v1/jobs/{job}/attempts/{attempt}/checkpoints": {"step": 1.0, "path": "/p"},
}


def routes_of(service: Service) -> set[tuple[str, str]]:
    found = set()
    for route in service.client.app.routes:  # type: ignore[attr-defined]
        inner = [route] if hasattr(route, "path") else route.original_router.routes
        found |= {(method, one.path) for one in inner for method in one.methods - {"HEAD"}}
    return found


@pytest.fixture
def people(service):
    """A client of each role, by name."""
    roles = {
        "root": "admin", "ann": "user", "bob": "user", "eve": "read-only", "box": "agent",
    }  # fmt: skip
    clients = {}
    for name, role in roles.items():
        answer = service.client.post("/v1/tokens", json={"name": name, "role": role})
        clients[name] = service.bare(authorization=f"Bearer {answer.json()['token']}")
    yield clients
    for name in roles:
        service.client.delete(f"/v1/tokens/{name}")


def test_the_table_names_every_route(service):
    assert routes_of(service) == set(TABLE)


@pytest.mark.parametrize("route", sorted(TABLE.keys() - STREAMS), ids=" ".join)
def test_a_route_is_open_to_its_roles_alone(service, people, route):
    method, template = route
    right = TABLE[route]
    for name, client in people.items():
        for owner in ("ann", "bob"):
            number = people[owner].post("/v1/jobs", json=JOB).json()["id"]
            path = template.format(
                job=number,
                number=number,
                attempt=1,
                change="pause",
                name="nobody",
                round=0,
                agent=name,
            )
            body = BODIES.get(template)
            status = client.request(method, path, json=body).status_code
            allowed = {
                OPEN: True,
                ALL: name != "box",
                USER: name in ("root", "ann", "bob"),
                AGENT: name == "box",
                OWN: name in ("root", owner),
                ADMIN: name == "root",
                ATTEMPT: False,
            }[right]
            if right == ATTEMPT:
                # A token of a user is no token of an attempt, whoever has it.
                assert status == 409
            elif allowed:
                assert status not in (401, 403), (name, owner)
            else:
                assert status == 403, (name, owner)
            if right == OWN and not allowed:
                assert service.job(number)["status"] in ("queued", "starting", "running")
            service.client.delete(f"/v1/jobs/{number}")
            service.client.delete("/v1/tokens/x")


def test_the_page_offers_changes_of_own_jobs_only(service, people):
    number = people["ann"].post("/v1/jobs", json=JOB).json()["id"]
    offered = {name: "cancel-button" in one.get(f"/jobs/{number}").text
               for name, one in people.items()}  # fmt: skip
    assert offered == {"root": True, "ann": True, "bob": False, "eve": False, "box": False}


# ── what users may ask for ──


CONFIG = """
[defaults]
max_weight = 2.0
[users.ann]
max_weight = 8
teams = ["vision"]
[teams.vision]
weight = 3
[teams.all]
is_open = true
"""


def test_weight_and_team_are_limited_by_the_config(service, people, tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text(CONFIG)
    before, service.daemon.config = service.daemon.config, read_server_config(path)
    try:
        for name, spec, status in (
            ("ann", {"weight": 8.0, "team": "vision"}, 201),
            ("ann", {"weight": 8.5}, 403),
            ("ann", {"team": "speech"}, 403),
            ("bob", {"weight": 2.0, "team": "all"}, 201),
            ("bob", {"weight": 2.5}, 403),
            ("bob", {"team": "vision"}, 403),
            ("root", {"weight": 1e6, "team": "speech"}, 201),
        ):
            answer = people[name].post("/v1/jobs", json=JOB | spec)
            assert answer.status_code == status, (name, spec, answer.text)
        assert "at most 2" in is_problem(
            people["bob"].post("/v1/jobs", json=JOB | {"weight": 9.0}), 403
        )["detail"]  # fmt: skip
        teams = service.daemon.config.teams
        assert {name: team.weight for name, team in teams.items()} == {
            "vision": 3.0, "all": 1.0,
        }  # fmt: skip
    finally:
        service.daemon.config = before
    # Without a config a user has one share and no team.
    assert people["bob"].post("/v1/jobs", json=JOB | {"weight": 1.5}).status_code == 403
    assert people["bob"].post("/v1/jobs", json=JOB | {"team": "a"}).status_code == 403


QUOTAS = """
[users.ann]
max_devices = 3
teams = ["vision"]
[users.root]
max_devices = 1
[teams.vision]
max_devices = 2
"""


@pytest.mark.parametrize(
    ("name", "spec", "limit"),
    [
        ("ann", {"gang": 4}, "user 'ann' may hold at most 3 devices at once, not 4"),
        ("ann", {"gangs": [4, 5]}, "at most 3 devices at once, not 4"),
        ("ann", {"gang": 3, "team": "vision"}, "team 'vision' may hold at most 2"),
        ("root", {"gang": 2}, "user 'root' may hold at most 1"),
        ("ann", {"gang": 3}, None),
        ("ann", {"gangs": [2, 8], "team": "vision"}, None),
        ("bob", {"gang": 4}, None),
    ],
)
def test_a_gang_above_a_quota_is_refused(tmp_path, name, spec, limit):
    path = tmp_path / "fleet.toml"
    path.write_text(QUOTAS)
    config, job = read_server_config(path), JobSpec(name="job", command=("true",), **spec)
    holder = Holder(name=name, role="admin" if name == "root" else "user")
    if limit is None:
        config.check(job, holder)
        return
    with pytest.raises(ForbiddenError, match=limit):
        config.check(job, holder)


@pytest.mark.parametrize(
    "text",
    ["[user.ann]", "[users.ann]\nwieght = 3", "[defaults]\nmax_weight = -1", "x", "[[users]]"],
)
def test_a_config_that_says_something_else_is_refused(tmp_path, text):
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(InputFileError) as error:
        read_server_config(path)
    assert str(path) in str(error.value)


# ── time ──


def test_a_cookie_expires_though_nothing_is_written():
    now_s = 1e9
    tokens = Tokens(now_s=lambda: now_s)
    cookie = tokens.make_cookie(Holder(name="ann"))
    token = tokens.add("ann")
    now_s += COOKIE_AGE_S - 1.0
    assert tokens.holder_of_cookie(cookie) == Holder(name="ann", role="user")
    now_s += 1.0
    assert tokens.holder_of_cookie(cookie) is None
    assert tokens.holder_of(token) is not None, "tokens do not expire"
