"""Requests made up from the published schema: no 5xx, and every answer is as it says."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from service.rest_service import TOKEN, URL, serving, tokens_of

from hocket.service.rest.app import make_app

ENDLESS = "/v1/events"
"""Ends with the connection only, so that no answer is ever whole."""
PATHS = (
    "/healthz", "/metrics", "/readyz", "/v1/agents/{agent}/checkpoints/{job}",
    "/v1/agents/{agent}/logs/{job}/{attempt}", "/v1/agents/{agent}/sync", "/v1/allocation",
    "/v1/devices", "/v1/devices:drain", "/v1/devices:reopen", "/v1/usage", "/v1/jobs",
    "/v1/jobs/{job}", "/v1/jobs/{job}/attempts", "/v1/jobs/{job}/attempts/{attempt}/checkpoints",
    "/v1/jobs/{job}/attempts/{attempt}/report", "/v1/jobs/{job}/checkpoints",
    "/v1/jobs/{job}/explain", "/v1/jobs/{job}/log", "/v1/jobs/{job}:pause", "/v1/jobs/{job}:resume",
    "/v1/login-links", "/v1/simulate", "/v1/tokens",
    "/v1/tokens/{name}",
)  # fmt: skip


@pytest.fixture(scope="module")
def schemathesis():
    """Imported by whoever runs these tests and not by whoever lists them: it takes seconds."""
    return pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def api(schemathesis, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("fleet")) as service:
        for at in range(4):
            service.submit(name=f"job {at}", total_steps=1e6)
        service.wait_for(1, "running")
        schema = service.client.get("/openapi.json").json()
        for operations in schema["paths"].values():
            for operation in operations.values():
                # Requests without a token have a test of their own; here all carry it.
                operation.pop("security", None)
        api = schemathesis.openapi.from_dict(schema)
        api.app = make_app(service.daemon, tokens_of(TOKEN), hosts=("testserver",))
        yield api


def test_these_are_all_routes(api):
    assert sorted(api.raw_schema["paths"]) == sorted((*PATHS, ENDLESS))


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("path", PATHS)
def test_answers_are_as_published(schemathesis, api, path, mode):
    generation = schemathesis.GenerationMode(mode)
    # The token of people is none of an attempt, and other cases end the jobs.
    excluded = [schemathesis.checks.positive_data_acceptance]
    for operation in (api[path][method] for method in api[path]):
        takes_something = operation.path_parameters or operation.query or operation.body
        if takes_something or not generation.is_negative:
            assert _num_validated(operation, generation, excluded) > 0


def _num_validated(operation, mode, excluded_checks) -> int:
    """Requests that were made and whose answers were as published."""
    num_validated = 0

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=6,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case):
        nonlocal num_validated
        case.call_and_validate(
            base_url=URL,
            headers={"authorization": f"Bearer {TOKEN}"},
            excluded_checks=excluded_checks,
        )
        num_validated += 1

    check()
    return num_validated
