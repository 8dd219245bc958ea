"""Shards placed by Ray, on a real local cluster; one is killed."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from hocket.tables import Layout, Node, TableSpec, ray_shards
from hocket.tables.address import client_port
from hocket.tables.ray_shards import RayShards

ray = pytest.importorskip("ray")
pytest.importorskip("zmq")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    from local_ray import local_ray

    with local_ray():
        yield


@pytest.mark.filterwarnings("ignore")
def test_a_shard_that_ray_lost_comes_back_at_its_address_with_every_change(tmp_path, caplog):
    layout = Layout((TableSpec("w", 6, 2, staleness=1),), 2, 1)
    with (
        caplog.at_level(logging.WARNING, logger="hocket.tables"),
        RayShards(layout, checkpoints=tmp_path, checkpoint_s=0.1) as shards,
        Node(layout, 0, client_port(layout, 0, shards.addresses), timeout_s=60) as node,
    ):
        addresses = list(shards.addresses)
        (worker,) = node.workers
        for clock in range(8):
            assert (worker["w"].get(np.arange(6)) == clock).all()
            worker["w"].inc(np.arange(6), np.ones((6, 2)))
            worker.clock()
            if clock == 3:
                ray.kill(shards.actors[1])
        node.flush()
        assert (worker["w"].get(np.arange(6)) == 8).all()
        assert shards.addresses == addresses
        assert shards.num_restarts == [0, 1]
    assert "shard 1 died" in caplog.text


def test_a_shard_whose_place_is_not_free_yet_is_tried_again(monkeypatch):
    shards, tries = RayShards(Layout((TableSpec("w", 6, 2),))), []

    def start(shard):
        tries.append(shard)
        if len(tries) < 3:
            raise ray.exceptions.RayError("the address is in use")
        return "serving"

    monkeypatch.setattr(shards, "_start", start)
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(ray_shards, "_TRY_S", 0)
    assert shards._started_again(0) == "serving"
    assert tries == [0, 0, 0]
