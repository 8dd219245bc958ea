from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.service.executors.ray_nodes import (
    RayNode,
    bundles_of,
    devices_of,
    name_nodes,
    read_nodes,
)


def row(node_id="f00", name="a", resources=None, labels=None, alive=True):
    return {
        "NodeID": node_id,
        "Alive": alive,
        "NodeName": name,
        "NodeManagerAddress": "10.0.0.1",
        "Resources": {"CPU": 8.0, "memory": 1e9, **(resources or {})},
        "Labels": {"ray.io/node-id": node_id, **(labels or {})},
    }


def node(node_id, title="a", **num_devices):
    resources = {kind: (f"accel_{kind}",) for kind in num_devices}
    return RayNode(
        node_id=node_id,
        title=title,
        address="10.0.0.1",
        num_devices=num_devices,
        resources=resources,
    )


def test_custom_resources_are_devices():
    (found,) = read_nodes([row(resources={"accel_v100": 2.0, "accel_k80": 1.0, "accel_": 3.0})])
    assert found.num_devices == {"v100": 2, "k80": 1}
    assert [device.name for device in devices_of({"a": found})] == [
        "a/k80/0",
        "a/v100/0",
        "a/v100/1",
    ]
    assert {device.server for device in devices_of({"a": found})} == {"a"}


def test_gpus_are_reserved_beside_custom_resources_so_that_ray_says_which():
    (found,) = read_nodes([row(resources={"accel_v100": 4.0, "GPU": 4.0})])
    bundles = bundles_of(["a/v100/1", "a/v100/3"], "v100", {"a": found})
    assert [dict(each.reserved) for each in bundles] == [{"accel_v100": 2.0, "GPU": 2.0}]


def test_label_names_the_kind_of_gpus():
    (found,) = read_nodes([row(resources={"GPU": 2.0}, labels={"ray.io/accelerator-type": "A100"})])
    assert found.num_devices == {"a100": 2}
    assert found.resources == {"a100": ("GPU",)}
    (own,) = read_nodes(
        [
            row(
                resources={"GPU": 1.0},
                labels={"ray.io/accelerator-type": "A100", "hocket/kind": "big"},
            )
        ]
    )
    assert own.num_devices == {"big": 1}


def test_nodes_without_devices_or_life_offer_none():
    found = read_nodes([row(), row("f01", alive=False, resources={"accel_v100": 2.0})])
    assert [each.node_id for each in found] == ["f00"]
    assert devices_of(name_nodes(found, {})) == []
    assert read_nodes([row(resources={"accel_v100": 0.5})])[0].num_devices == {}


def test_gang_over_nodes_is_one_bundle_each_with_ranks_in_the_order_of_devices():
    named = {"a": node("f00", v100=2), "b": node("f01", v100=2)}
    bundles = bundles_of(["b/v100/0", "a/v100/0", "a/v100/1"], "v100", named)
    assert [(each.node_id, each.first_rank) for each in bundles] == [("f01", 0), ("f00", 1)]
    assert [dict(each.reserved) for each in bundles] == [{"accel_v100": 1.0}, {"accel_v100": 2.0}]


def test_a_device_that_is_not_there_is_named():
    named = {"a": node("f00", v100=2)}
    for device in ("a/v100/2", "b/v100/0", "a/k80/0", "a/v100/x", "v100"):
        assert bundles_of(["a/v100/0", device], "v100", named) == device


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from("ab/")), max_size=30))
def test_names_stay_with_nodes_as_long_as_they_live(story):
    living, before, number = [], {}, 0
    for is_new, title in story:
        if is_new or not living:
            number += 1
            living.append(node(f"{number:03}", title, v100=1))
        else:
            living.pop(0)
        named = name_nodes(living, before)
        owners = {name: each.node_id for name, each in named.items()}
        assert sorted(owners.values()) == sorted(each.node_id for each in living)
        for name, owner in before.items():
            if any(each.node_id == owner for each in living):
                assert owners[name] == owner
        # Names are taken over, so there are never more than nodes that lived at once.
        assert all(name.count("/") == 0 for name in owners)
        before = owners


def test_a_node_that_comes_back_has_its_old_name():
    first = name_nodes([node("f00", "a"), node("f01", "a")], {})
    assert list(first) == ["a", "a#2"]
    owners = {name: each.node_id for name, each in first.items()}
    again = name_nodes([node("f01", "a"), node("f02", "a")], owners)
    assert {name: each.node_id for name, each in again.items()} == {"a": "f02", "a#2": "f01"}
