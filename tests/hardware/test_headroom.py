"""Memory that no plan may fill: stated by the kind, subtracted once, changed by a person."""

import json
from dataclasses import replace

import pytest
from cli.terminal import hocket

from hocket.api.clusters import with_dispatch
from hocket.api.planned import plan_graph
from hocket.base.errors import InputFileError, UsageError
from hocket.cost.host import EAGER, REFERENCE_DISPATCH_S, HostOverhead, measured_host
from hocket.graph.generators.forward_graphs import chain
from hocket.hardware.detect import unstated_headroom_bytes
from hocket.hardware.files import cluster_from_dict, cluster_to_dict
from hocket.hardware.kinds import preset_kinds
from hocket.hardware.shorthand import cluster_from_text
from hocket.plan.make import make_problem

GIB = 2**30


def usable_bytes(kind):
    return kind.memory_bytes - kind.headroom_bytes


def test_every_gpu_that_is_known_keeps_room_for_context_and_fragmentation():
    for entry in preset_kinds().values():
        kind = entry.kind
        if kind.is_cpu:
            assert 0 < kind.headroom_bytes < GIB
            continue
        # Measured on an H200: 773 MiB of context and libraries, 64 MiB of workspace; steps whose
        # tensors peak at 38 GiB need 10 % beside (5 % fail), those of 65 GiB 3.3 GiB.
        assert kind.headroom_bytes >= 0.75 * GIB + min(0.1 * usable_bytes(kind), 3.9 * GIB)
        assert kind.headroom_bytes <= unstated_headroom_bytes(kind.memory_bytes) + 0.4 * GIB


def test_a_problem_has_the_memory_of_its_devices_less_their_headroom():
    cluster = cluster_from_text("1xrtx3090+1xt4")
    usable = make_problem(chain(3, seed=0), cluster).memory_bytes.tolist()
    for has, device in zip(usable, cluster.devices, strict=True):
        assert has == device.memory_bytes - device.kind.headroom_bytes == device.usable_bytes
    chosen = make_problem(chain(3, seed=0), cluster, headroom_bytes=GIB).memory_bytes.tolist()
    assert chosen == [device.memory_bytes - GIB for device in cluster.devices]


def test_headroom_is_part_of_the_file_and_of_the_hash():
    cluster = cluster_from_text("2xv100-16g")
    again = cluster_from_dict(json.loads(json.dumps(cluster_to_dict(cluster))))
    assert again.devices == cluster.devices
    assert again.content_hash == cluster.content_hash
    other = cluster.with_headroom(2 * GIB)
    assert other.content_hash != cluster.content_hash
    assert {device.kind.headroom_bytes for device in other.devices} == {2 * GIB}


def test_the_rate_of_updates_on_the_host_is_part_of_the_file_and_of_the_hash():
    plain = cluster_from_text("2xv100-16g")
    stated = {**cluster_to_dict(plain), "host_update": "120GB/s"}
    cluster = cluster_from_dict(stated)
    assert cluster.host_update_bps == 120e9
    assert cluster.content_hash != plain.content_hash
    assert cluster_from_dict(cluster_to_dict(cluster)) == cluster
    assert "host_update" not in cluster_to_dict(plain)
    with pytest.raises(InputFileError, match="host_update"):
        cluster_from_dict({**stated, "host_update": "fast"})


def test_joined_machines_update_as_fast_as_the_slowest_host(tmp_path):
    for name, rate in (("a", "50GB/s"), ("b", "90GB/s")):
        text = f'host_update = "{rate}"\n[[devices]]\nkind = "t4"\n'
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
    joined = cluster_from_text(f"{tmp_path / 'a.toml'}+{tmp_path / 'b.toml'}")
    assert joined.host_update_bps == 50e9


@pytest.mark.parametrize("headroom", ["16GiB", "20GiB"])
def test_headroom_that_leaves_nothing_is_refused(headroom):
    kind = {"memory": "16GiB", "headroom": headroom, "memory_bandwidth": "1GB/s",
            "peak": {"float32": "1TFLOP/s"}}  # fmt: skip
    with pytest.raises(InputFileError, match="headroom: is not less than the memory"):
        cluster_from_dict({"kinds": {"x": kind}, "devices": [{"kind": "x"}]})
    with pytest.raises(UsageError, match="leaves nothing"):
        cluster_from_text("1xv100-16g").with_headroom(16 * GIB)


def test_a_device_smaller_than_its_headroom_holds_nothing():
    device = cluster_from_text("1xv100-16g").devices[0]
    assert replace(device, memory_bytes=GIB).usable_bytes == 0


def test_plan_keeps_it_free_and_show_explain_and_report_name_it(tmp_path):
    graph = chain(30, seed=1)
    peak = max(plan_graph(graph, "1xv100-16g").peak_bytes.values())
    tight = 16 * GIB - peak
    from hocket.graph.files import write_graph

    write_graph(graph, tmp_path / "g.json")
    on = ["plan", "g.json", "--on", "1xv100-16g", "--planner", "one-device", "--headroom"]
    hocket(*on, f"{tight}B", cwd=tmp_path)
    assert "headroom" in hocket("show", "plan.json", cwd=tmp_path).stdout
    assert "headroom" in hocket("explain", "plan.json", cwd=tmp_path).stdout
    assert "Headroom for context" in (tmp_path / "report.html").read_text()
    refused = hocket(*on, f"{tight + 1}B", cwd=tmp_path, expect=4)
    assert "--headroom" in refused.stderr
    assert "is not a number with a unit" in hocket(*on, "much", cwd=tmp_path, expect=2).stderr


def test_a_measured_dispatch_time_is_read_written_hashed_and_joined():
    plain = cluster_from_text("1xt4")
    slow = with_dispatch(plain, 26.6e-6)
    assert slow.kinds[0].dispatch_s == 26.6e-6
    assert cluster_from_dict(cluster_to_dict(slow)).kinds == slow.kinds
    assert slow.content_hash != plain.content_hash
    assert "dispatch" not in str(cluster_to_dict(plain))


def test_a_host_that_dispatches_half_as_fast_takes_twice_as_long():
    host = measured_host(2 * REFERENCE_DISPATCH_S)
    assert host == HostOverhead(
        forward_s=2 * EAGER.forward_s, backward_s=2 * EAGER.backward_s,
        optimizer_s=2 * EAGER.optimizer_s, overlaps=True,
    )  # fmt: skip
