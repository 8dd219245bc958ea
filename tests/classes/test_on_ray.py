"""The front end of Ray Serve, with parts that need no Ray."""

import asyncio
import os
from types import SimpleNamespace

import numpy as np
import pytest
from classes.small import SHAPE, small_folder, whole_scores

from hocket.base.errors import UsageError
from hocket.classes.serving.front_end import ServeOptions
from hocket.classes.serving.on_ray import RayFrontEnd, RayPart
from hocket.cli.serve_classes import command

TOKEN = "a-token-of-many-characters"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_folder(tmp_path_factory.mktemp("parts"))


class Handle:
    """As a handle of Ray Serve: a call whose result is awaited; it may fail or never come."""

    def __init__(self, part, fate=""):
        self._part, self._fate = part, fate

    async def remote(self, inputs):
        if self._fate == "dead":
            raise ConnectionError("the actor died")
        if self._fate == "silent":
            await asyncio.Event().wait()
        return self._part(inputs)


def front_end(folder, fates=("", "", ""), deadline_s=60.0):
    parts = [Handle(RayPart(model), fate) for model, fate in zip(folder.models, fates, strict=True)]
    return RayFrontEnd(folder.table.to_data(), ServeOptions(deadline_s=deadline_s), TOKEN, *parts)


@pytest.mark.parametrize("fates", [("", "", ""), ("dead", "", ""), ("", "silent", "")])
def test_every_class_is_answered_for_though_a_part_dies_or_is_silent(folder, fates):
    given = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    answer = asyncio.run(front_end(folder, fates).predict(given))
    assert answer.missing == ()
    assert answer.scores == pytest.approx(whole_scores(given)[0], rel=1e-4, abs=1e-4)


def test_a_deadline_gives_what_has_come_and_wrong_inputs_are_refused(folder):
    given = np.zeros(SHAPE, np.float32)
    answer = asyncio.run(front_end(folder, ("silent", "silent", ""), 1.0).predict(given))
    assert {0, 1, 2, 3, 4, 5} - set(folder.table.parts[2].classes) <= set(answer.missing)
    with pytest.raises(UsageError, match="has the shape"):
        asyncio.run(front_end(folder).predict(np.zeros(3)))


@pytest.mark.parametrize(
    ("token", "body", "status"),
    [
        ("wrong", b"", 401),
        (TOKEN, b"{", 400),
        (TOKEN, b'{"input": ["1"]}', 422),
        (TOKEN, b" " * 10**7, 413),
    ],
)
def test_requests_need_the_token_and_one_input(folder, token, body, status):
    async def stream():
        for start in range(0, len(body), 10**5):
            yield body[start : start + 10**5]

    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    request = SimpleNamespace(method="POST", headers=headers, stream=stream)
    assert asyncio.run(front_end(folder)(request)).status_code == status


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--device", "cpu", "--spin", "2ms"), "--device has no use for --spin"),
        (("--device", "cpu", "--quorum", "1", "--deadline", "2s"), "--deadline and --quorum"),
        (("--ray", "--spin", "2ms"), "--ray has no use for --spin"),
    ],
)
def test_options_that_a_way_of_serving_has_no_use_for_are_refused(options, names):
    with pytest.raises(UsageError, match=names):
        command.main(["nowhere", *options], standalone_mode=False)


def test_workers_do_not_spin_on_cores_that_others_need(folder, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    with pytest.raises(UsageError, match="3 workers that spin and the front end need 4 cores"):
        command.main([str(folder.path), "--spin", "2ms"], standalone_mode=False)
