"""What is written of a cluster reads back the same, and its hash covers every figure."""

import json
import tomllib
from dataclasses import replace

import pytest
from hardware.hardware_samples import DEVICES, LINKED, from_toml
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import InputFileError
from hocket.hardware import Cluster, Device, DeviceKind, Link
from hocket.hardware.files import cluster_from_dict, cluster_to_dict, cluster_to_toml, read_cluster
from hocket.hardware.kinds import PEAK_TYPES, PRESETS

names = st.from_regex(r"[a-z_][a-z0-9_.:-]{0,6}", fullmatch=True)
rates = st.one_of(
    st.floats(1e-6, 1e18, allow_nan=False), st.integers(1, 10**12), st.just(1e9), st.just(5.7e9)
)
times = st.one_of(st.floats(0, 10), st.sampled_from([0, 1e-6, 1.5e-5, 0.000134]))


@st.composite
def clusters(draw) -> Cluster:
    kinds = [
        DeviceKind(
            name=name,
            memory_bytes=draw(st.integers(1, 2**50)),
            peak_flops=draw(st.dictionaries(st.sampled_from(PEAK_TYPES), rates)),
            memory_bandwidth_bps=draw(rates),
            launch_s=draw(times),
            price_per_hour=draw(st.floats(0, 100)),
            is_cpu=draw(st.booleans()),
            source=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
        )
        for name in draw(st.lists(names, min_size=1, max_size=2, unique=True))
    ]
    hosts = draw(st.lists(names.map("h.".__add__), min_size=1, max_size=3, unique=True))
    device_names = draw(
        st.one_of(
            st.lists(names, min_size=1, max_size=6, unique=True),
            st.integers(1, 6).map(lambda n: [f"gpu{i}" for i in range(n)]),
            st.integers(1, 6).map(lambda n: [f"gpu{i}" for i in range(1, n + 1)]),
        )
    )
    devices = []
    for name in device_names:
        kind = draw(st.sampled_from(kinds))
        memory_bytes = draw(st.sampled_from([kind.memory_bytes, max(1, kind.memory_bytes // 3)]))
        host = draw(st.sampled_from(hosts))
        devices.append(Device(name=name, kind=kind, host=host, memory_bytes=memory_bytes))
    places = [*device_names, *hosts]
    links = []
    for device in devices:
        ends = draw(st.lists(st.sampled_from(places), min_size=1, max_size=3, unique=True))
        ends = tuple(dict.fromkeys([device.name, *ends, device.host]))
        named = draw(st.sampled_from(["-".join(ends), f"link{len(links)}"]))
        if named in {link.name for link in links}:
            named = f"link{len(links)}"
        links.append(
            Link(
                name=named,
                ends=ends,
                bandwidth_bps=draw(rates),
                latency_s=draw(times),
                duplex=draw(st.sampled_from(["full", "half"])),
            )
        )
    meta = draw(
        st.dictionaries(names, st.one_of(st.text('aé"\\\n\x7f', max_size=4), st.floats(0, 1)))
    )
    return Cluster(
        name=draw(st.text("ab \"'#", min_size=1, max_size=5)),
        devices=tuple(devices),
        hosts=tuple(hosts),
        links=tuple(links),
        uses_stated_times=draw(st.booleans()),
        meta=meta,
    )


@given(clusters())
@settings(derandomize=True, deadline=None, max_examples=70)
def test_written_clusters_read_back_the_same(cluster):
    text = cluster_to_toml(cluster)
    data = json.loads(json.dumps(cluster_to_dict(cluster)))
    assert tomllib.loads(text) == data
    again = cluster_from_dict(data, "x")
    assert again.content_hash == cluster.content_hash
    assert again.meta == cluster.meta
    assert again.uses_stated_times == cluster.uses_stated_times
    assert again.devices == cluster.devices
    assert cluster_to_toml(again) == text


def test_writer_keeps_quantities_readable():
    text = cluster_to_toml(read_cluster(PRESETS / "dgx1-v100.toml"))
    assert 'memory = "16GiB"' in text
    assert 'bandwidth = "25GB/s"' in text
    assert 'latency = "2us"' in text
    assert 'latency = "0s"' in text
    assert "count = 8" in text


def test_content_hash_ignores_sources_but_no_figure():
    base = from_toml(DEVICES + LINKED)
    assert from_toml(DEVICES + LINKED + 'source = "x"\n').content_hash == base.content_hash
    assert from_toml("meta.x = 1\n" + DEVICES + LINKED).content_hash == base.content_hash
    changes = [("2GiB", "3GiB"), ("100GB/s", "101GB/s"), ("1TFLOP", "2TFLOP"), ("5us", "6us")]
    hashes = {from_toml(DEVICES + LINKED.replace(*change)).content_hash for change in changes}
    assert len(hashes | {base.content_hash}) == 5


def test_content_hash_covers_whether_transfer_times_are_stated():
    plain, stated = (
        from_toml(text + DEVICES + LINKED) for text in ("", "uses_stated_times = true\n")
    )
    assert stated.uses_stated_times
    assert not plain.uses_stated_times
    assert plain.content_hash != stated.content_hash
    noted = from_toml('meta.from = "file"\n' + DEVICES + LINKED)
    assert not noted.uses_stated_times
    assert noted.content_hash == plain.content_hash


def test_cluster_refuses_two_kinds_of_one_name():
    cluster = from_toml(DEVICES + LINKED)
    first, second = cluster.devices
    alike = replace(second, kind=replace(second.kind))
    assert replace(cluster, devices=(first, alike)).kinds == (first.kind,)
    other = replace(second, kind=replace(second.kind, memory_bandwidth_bps=1e9))
    with pytest.raises(InputFileError, match="two kinds of device have the name 'small'") as caught:
        replace(cluster, devices=(first, other))
    assert caught.value.hint
