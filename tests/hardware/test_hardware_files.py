"""Hardware files: what people write is read strictly."""

import os
import time
import tomllib
from pathlib import Path

import pytest
from hardware.hardware_samples import DEVICES, KIND, LINKED, from_toml
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import InputFileError
from hocket.hardware.files import (
    cluster_from_dict,
    machine_from_dict,
    read_cluster,
    read_machine,
)
from hocket.hardware.kinds import PRESETS
from hocket.hardware.shorthand import read_any_machine


def refused(text: str) -> InputFileError:
    with pytest.raises(InputFileError) as caught:
        from_toml(text)
    assert caught.value.where == "test.toml"
    return caught.value


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


def test_reader_understands_every_kind_of_entry():
    cluster = from_toml(
        """
        name = "box"
        switches = ["sw"]
        meta.source = "me"
        [[devices]]
        kind = "small"
        count = 2
        [[devices]]
        kind = "small"
        name = "odd"
        host = "other"
        memory = "1GiB"
        [[links]]
        between = [["gpu*", "sw"]]
        bandwidth = "80Gbit/s"
        latency = "3us"
        [[links]]
        name = "shared"
        ends = ["odd", "sw", "host"]
        bandwidth = 5e9
        duplex = "half"
        """
        + KIND
    )
    assert cluster.name == "box"
    assert cluster.device_names == ("gpu0", "gpu1", "odd")
    assert cluster.hosts == ("host", "other")
    assert [device.memory_bytes for device in cluster.devices] == [2**31, 2**31, 2**30]
    assert [link.ends for link in cluster.links] == [
        ("gpu0", "sw"),
        ("gpu1", "sw"),
        ("odd", "sw", "host"),
    ]
    assert [link.bandwidth_bps for link in cluster.links] == [1e10, 1e10, 5e9]
    assert [link.name for link in cluster.links] == ["gpu0-sw", "gpu1-sw", "shared"]
    assert [link.duplex for link in cluster.links] == ["full", "full", "half"]
    assert cluster.links[0].latency_s == pytest.approx(3e-6)
    assert cluster.links[2].latency_s == 0.0
    assert cluster.meta == {"source": "me"}


def test_reader_numbers_unnamed_devices_across_entries():
    cluster = from_toml('[[devices]]\nkind="small"\n[[devices]]\nkind="small"\ncount=2\n' + LINKED)
    assert cluster.device_names == ("gpu0", "gpu1", "gpu2")


def test_reader_joins_unlinked_devices_to_their_host():
    cluster = from_toml('[[devices]]\nkind="small"\ncount=2\nhost="h"\n' + LINKED)
    assert [(link.ends, link.bandwidth_bps) for link in cluster.links] == [
        (("gpu0", "h"), 12e9),
        (("gpu1", "h"), 12e9),
    ]


def test_reader_leaves_a_lone_device_without_links():
    assert from_toml('[[devices]]\nkind="small"\n' + KIND).links == ()


def test_between_one_pattern_twice_makes_a_mesh():
    cluster = from_toml(
        '[[devices]]\nkind="small"\ncount=4\n'
        '[[links]]\nbetween=[["gpu*","gpu*"]]\nbandwidth="1GB/s"\n' + KIND
    )
    pairs = {frozenset(link.ends) for link in cluster.links}
    assert len(cluster.links) == len(pairs) == 6


def test_own_kind_replaces_a_preset_of_the_same_name():
    text = '[[devices]]\nkind="t4"\n' + KIND.replace("small", "t4")
    assert from_toml(text).devices[0].kind.peak_flops == {"float32": 1e12}


def test_network_is_read_beside_the_cluster():
    text = '[[devices]]\nkind="small"\n[network]\nbandwidth="100Gbit/s"\n' + KIND
    machine = machine_from_dict(tomllib.loads(text), "x")
    assert machine.network is not None
    assert machine.network.at == ("host",)
    assert machine.network.link.bandwidth_bps == 12.5e9


def test_read_machine_of_every_preset_states_source_and_network():
    for path in sorted(PRESETS.glob("*.toml")):
        if path.stem == "kinds":
            continue
        machine = read_machine(path)
        assert machine.cluster.name == path.stem
        assert machine.cluster.meta["source"]
        assert machine.network is not None
        assert all(kind.source for kind in machine.cluster.kinds)


def test_reading_a_large_file_is_quick(tmp_path):
    path: Path = tmp_path / "large.toml"
    path.write_text(DEVICES.replace("2", "100000") + LINKED, encoding="utf-8")
    start = time.process_time()
    assert read_cluster(path).num_devices == 100_000
    assert time.process_time() - start < 10


# ── refusing ─────────────────────────────────────────────────────────────────────────────────────

LINK = '[[links]]\nends = ["gpu0", "gpu1"]\nbandwidth = "1GB/s"\n'


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (DEVICES + "devces = 1\n" + LINKED, "unknown key 'devces' in devices[0]", "known: "),
        ("swtches = []\n" + DEVICES + LINKED, "unknown key 'swtches'", "'switches'"),
        (DEVICES + LINK + "bandwith = 1\n" + KIND, "'bandwith' in links[0]", "'bandwidth'"),
        (DEVICES + LINKED + "memmory = 1\n", "'memmory' in kinds.small", "'memory'"),
        (DEVICES + LINKED.replace("float32", "float23"), "kinds.small.peak", "'float32'"),
        (DEVICES + LINKED.replace("latency", "lag"), "kinds.small.host_link", "latency"),
        (DEVICES.replace("small", "smal") + LINKED, "unknown kind 'smal'", "'small'"),
        (DEVICES + LINK.replace('"gpu1"', '"gpu7"') + KIND, "called 'gpu7'", "did you mean 'gpu"),
        (DEVICES + LINK.replace('"gpu1"', '"gpu0"') + KIND, "links[0].ends", ""),
        (DEVICES + LINK.replace("1GB/s", "1GB") + KIND, "'1GB' is not a bandwidth", "25GB/s"),
        (DEVICES + LINK.replace("1GB/s", "100Gbps") + KIND, "links[0].bandwidth", "25GB/s"),
        (DEVICES + LINK.replace('"1GB/s"', "25") + KIND, "in bytes per second", "25GB/s"),
        (DEVICES + LINK.replace('"1GB/s"', "true") + KIND, "links[0].bandwidth", "25GB/s"),
        (DEVICES + LINK.replace('"1GB/s"', "nan") + KIND, "out of range", "25GB/s"),
        (DEVICES + LINK + "latency = 10\n" + KIND, "in seconds", "10us"),
        (DEVICES + LINK + 'duplex = "both"\n' + KIND, "links[0].duplex is 'both'", "full, half"),
        (DEVICES + LINKED.replace('"2GiB"', "16"), "in bytes", "16GiB"),
        (DEVICES + LINKED.replace('"2GiB"', '"0B"'), "kinds.small.memory", "16GiB"),
        (DEVICES + LINKED.replace('"2GiB"', '"1e300GiB"'), "kinds.small.memory", "16GiB"),
        (
            DEVICES + LINKED.replace('memory = "2GiB"\n', ""),
            "kinds.small has no key 'memory'",
            "16GiB",
        ),
        (DEVICES + LINKED.replace("1TFLOP/s", "1TFLOPS"), "is not a rate", "TFLOP/s"),
        (DEVICES + 'memory = "3GiB"\n' + LINKED, "more than the kind 'small' has", ""),
        (DEVICES.replace("2", "0") + LINKED, "devices[0].count is 0", "an integer from 1"),
        (DEVICES.replace("2", "2.5") + LINKED, "devices[0].count is 2.5", "an integer from 1"),
        (DEVICES.replace("2", "100001") + LINKED, "devices[0].count is 100001", "to 100000"),
        (2 * DEVICES.replace("2", "60000") + LINKED, "more than 100000 devices", ""),
        (DEVICES + KIND, "device 'gpu0' has no link", "host_link"),
        ('[[devices]]\nkind="small"\nname="host"\n' + LINKED, "the name 'host'", "distinct"),
        ('[[devices]]\nkind="small"\nname="a b"\n' + LINKED, "'a b' cannot be a name", "spaces"),
        (LINKED, "devices: the list is empty", "[[devices]]"),
        ('[devices]\nkind="small"\n' + LINKED, "list of tables", "[[devices]]"),
        (DEVICES + LINK + 'between = [["a","b"]]\n' + KIND, "either 'ends'", "between"),
        (
            DEVICES + '[[links]]\nbetween=["gpu0","gpu1"]\nbandwidth="1GB/s"\n' + KIND,
            "list of pairs",
            "nvswitch",
        ),
        (DEVICES + LINKED + '[network]\nat=["hots"]\nbandwidth="1GB/s"\n', "'hots'", "'host'"),
        ("devices = [5]\n" + LINKED, "devices[0] is 5", "a table with the keys kind"),
        ("name = 5\n" + DEVICES + LINKED, "name is 5", "text in quotes"),
        ("hosts = 5\n" + DEVICES + LINKED, "hosts is 5", "a list"),
        ("uses_stated_times = 1\n" + DEVICES + LINKED, "uses_stated_times is 1", "true or false"),
        (DEVICES + LINKED + "cpu = 1\n", "kinds.small.cpu is 1", "true or false"),
        (DEVICES + LINKED + "price_per_hour = nan\n", "price_per_hour is nan", "a number from 0"),
        ("meta.x = [1]\n" + DEVICES + LINKED, "meta.x", ""),
        (
            DEVICES + 2 * (LINK + 'name = "same"\n') + KIND,
            "two links have the name 'same'",
            "differ",
        ),
    ],
)
def test_reader_refuses_with_place_and_hint(text, message, hint):
    error = refused(text)
    assert message in error.message
    assert hint in error.hint
    assert not error.message.endswith(".")


@pytest.mark.parametrize("name", ["k" * 10**6, "a b", "", 7])
def test_reader_refuses_odd_names_of_kinds_shortly(name):
    kind = {"memory": "2GiB", "memory_bandwidth": "100GB/s", "peak": {"float32": "1TFLOP/s"}}
    for content in (kind, {**kind, "k" * 10**6: 1}, 5):
        with pytest.raises(InputFileError) as caught:
            cluster_from_dict({"devices": [{"kind": name}], "kinds": {name: content}}, "x")
        assert caught.value.message
        assert len(str(caught.value)) < 400
        assert caught.value.where == "x"


def test_reader_refuses_a_mesh_that_would_fill_memory():
    start = time.process_time()
    error = refused(
        DEVICES.replace("2", "100000")
        + '[[links]]\nbetween=[["gpu*","gpu*"]]\nbandwidth="1GB/s"\n'
        + KIND
    )
    assert "more than 1000000 links" in error.message
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name = ", "is not TOML"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"x = " + b"[" * 5000, "is"),
        (b"x = " + b"1" * 5000, "is not TOML"),
        (b"#" * 10_000_001, "larger than 10 MB"),
        (b"", "the list is empty"),
    ],
)
def test_read_cluster_refuses_broken_files(tmp_path, content, message):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(InputFileError, match=message) as caught:
        read_cluster(path)
    assert caught.value.where == str(path)


def test_read_cluster_refuses_missing_files_and_folders(tmp_path):
    with pytest.raises(InputFileError, match="no such file"):
        read_cluster(tmp_path / "absent.toml")
    with pytest.raises(InputFileError, match="Is a directory"):
        read_cluster(tmp_path)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just("gpu*")
)
keys = st.sampled_from(
    ["name", "meta", "hosts", "switches", "kinds", "network", "devices", "links", "kind", "count",
     "host", "memory", "ends", "between", "bandwidth", "latency", "duplex", "peak", "at", "x"]
)  # fmt: skip
junk = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=12,
)


@given(st.dictionaries(keys, junk, max_size=6))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_reader_never_fails_otherwise_than_by_refusing(data):
    where = "junk"
    try:
        cluster_from_dict(data, "junk")
    except InputFileError as error:
        where = error.where
    assert where == "junk"


@given(data=st.data())
@settings(derandomize=True, deadline=None, max_examples=120)
def test_reader_survives_any_damage_to_a_good_file(data):
    good = tomllib.loads((PRESETS / "dgx1-v100.toml").read_text(encoding="utf-8"))
    section = data.draw(st.sampled_from(["devices", "links", "network"]))
    table = good[section] if section == "network" else data.draw(st.sampled_from(good[section]))
    table[data.draw(keys)] = data.draw(junk)
    where = "damaged"
    try:
        cluster_from_dict(good, "damaged")
    except InputFileError as error:
        where = error.where
    assert where == "damaged"


def test_a_matrix_that_is_a_pipe_or_too_large_is_refused_at_once(tmp_path):
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    with pytest.raises(InputFileError, match="it is a pipe"):
        read_any_machine(str(pipe))
    large = tmp_path / "large.txt"
    with large.open("wb") as file:
        file.truncate(10_000_001)
    with pytest.raises(InputFileError, match="larger than 10 MB"):
        read_any_machine(str(large))


@pytest.mark.parametrize("cell", ["NV99999999999", "NV-2", "NV", "NVx"])
def test_a_number_of_nvlinks_that_is_none_is_refused_and_not_read_as_pcie(tmp_path, cell):
    path = tmp_path / "matrix.txt"
    path.write_text(f"\tGPU0\tGPU1\nGPU0\t X \tNV2\nGPU1\t{cell}\t X \n")
    with pytest.raises(InputFileError, match=f"the entry for GPU1 and GPU0 is '{cell}'") as refused:
        read_any_machine(str(path))
    assert refused.value.where == str(path)
    path.write_text(path.read_text().replace(f"GPU1\t{cell}", "GPU1\tNV2"))
    assert read_any_machine(str(path)).cluster.links[0].bandwidth_bps == 40e9


@pytest.mark.parametrize(("width", "lanes"), [("8", 8), ("0", 16), ("", 16)])
def test_lanes_that_a_virtual_machine_hides_are_taken_for_sixteen(tmp_path, width, lanes):
    assert dumped(tmp_path, width).links[0].bandwidth_bps == pytest.approx(lanes * 0.75e9)


@pytest.mark.parametrize("width", ["-4", "33", "1e3", "9" * 5000])
def test_a_number_of_lanes_that_is_none_is_refused(tmp_path, width):
    with pytest.raises(InputFileError, match="is not a number of lanes up to 32"):
        dumped(tmp_path, width)


def dumped(folder, width):
    path = folder / "topology.xml"
    path.write_text(
        '<system version="1"><cpu numaid="0" modelid="85"><pci busid="0000:06:00.0" '
        f'link_width="{width}"><gpu dev="0" sm="70"/></pci></cpu></system>'
    )
    return read_any_machine(str(path)).cluster


@pytest.mark.parametrize("key", ["modelid", "sm"])
def test_numbers_of_a_topology_dump_that_nobody_can_read_count_as_not_given(tmp_path, key):
    known = {"modelid": "85", "sm": "70"}
    path = tmp_path / "topology.xml"
    machines = []
    for many in ({}, {key: "9" * 5000}):
        said = known | many
        path.write_text(
            f'<system version="1"><cpu numaid="0" modelid="{said["modelid"]}">'
            f'<pci busid="0000:06:00.0" link_width="16"><gpu dev="0" '
            f'sm="{said["sm"]}"/></pci></cpu></system>'
        )
        machines.append(read_any_machine(str(path)).cluster)
    assert machines[0].num_devices == machines[1].num_devices


def test_bridges_of_a_dump_that_repeat_a_bus_id_are_switches_of_their_own(tmp_path):
    def bridge(number):
        return (
            '<pci busid="0000:C5:00.0" link_width="16" class="0x060400">'
            f'<pci busid="0000:0{number}:00.0" link_width="16"><gpu dev="{number}" sm="70"/></pci>'
            "</pci>"
        )

    path = tmp_path / "topology.xml"
    path.write_text(
        f'<system version="1"><cpu numaid="0" modelid="85">{bridge(0)}{bridge(1)}</cpu></system>'
    )
    cluster = read_any_machine(str(path)).cluster
    assert cluster.num_devices == 2
    assert {"pci-0000.c5.00.0", "pci-0000.c5.00.0-2"} <= set(cluster.switches)
