"""Shorthand: names, counts, joined machines and refusals."""

import time
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import HocketError, InputFileError, UsageError
from hocket.hardware import (
    cluster_from_dict,
    cluster_from_text,
    cluster_to_dict,
    cluster_to_toml,
    stated_cluster,
)
from hocket.hardware.kinds import preset_kinds
from hocket.hardware.shorthand import PER_HOST, machine_names


def test_shorthand_puts_kinds_on_one_host():
    cluster = cluster_from_text("1xh100+2xl4")
    assert cluster.device_names == ("gpu0", "gpu1", "gpu2")
    assert [device.kind.name for device in cluster.devices] == ["h100-80g", "l4", "l4"]
    assert cluster.hosts == ("host",)
    assert cluster.routes.bandwidth_bps[0, 1] == 24e9
    assert cluster.routes.hops[0, 1] == 2


def test_shorthand_joins_machines_by_their_own_network():
    cluster = cluster_from_text("2xdgx-a100-80g")
    assert cluster.num_devices == 16
    assert cluster.device_names[0] == "host0.gpu0"
    assert cluster.device_names[-1] == "host1.gpu7"
    assert cluster.hosts == ("host0", "host1")
    assert {device.host for device in cluster.devices[8:]} == {"host1"}
    nics = [link for link in cluster.links if "network" in link.ends]
    assert sum(link.bandwidth_bps for link in nics) == 2 * 8 * 200e9 / 8
    assert cluster.routes.bandwidth_bps[0, 1] == 300e9
    assert cluster.routes.bandwidth_bps[0, 8] == 24e9
    path = [cluster.routes.channel_names[c] for c in cluster.routes.path(0, 8)]
    assert any("→network" in channel for channel in path)


def test_shorthand_joins_plain_hosts_by_100_gbit():
    cluster = cluster_from_text("20xt4")
    assert len(cluster.hosts) == 3
    on_first = [device for device in cluster.devices if device.host == "host0"]
    assert len(on_first) == PER_HOST
    assert cluster.routes.bandwidth_bps[0, 1] == 12e9
    nics = {link.bandwidth_bps for link in cluster.links if "network" in link.ends}
    assert nics == {12.5e9}


def test_shorthand_mixes_machines_and_kinds():
    cluster = cluster_from_text("dgx1-v100 + 2xl4")
    assert cluster.num_devices == 10
    assert cluster.device_names[8:] == ("host1.gpu0", "host1.gpu1")
    assert cluster.routes.hops.min() >= 0


def test_shorthand_counts_machine_names_that_hold_numbers():
    assert cluster_from_text("2xl4x8").num_devices == 16
    assert cluster_from_text("rtx2080x4").num_devices == 4
    assert cluster_from_text("rtx2080").num_devices == 1


@pytest.mark.parametrize(
    ("text", "kind", "devices", "inside_gbps"),
    [("4xh100-sxm", "h100-80g", 4, 450), ("4xa100-sxm", "a100-80g", 4, 300),
     ("12xh200-sxm", "h200-141g", 12, 450)],
)  # fmt: skip
def test_shorthand_takes_modules_of_a_board_with_their_own_links(text, kind, devices, inside_gbps):
    cluster = cluster_from_text(text)
    assert [device.kind.name for device in cluster.devices] == [kind] * devices
    assert cluster.network.inside_bps == inside_gbps * 1e9


def test_shorthand_resolves_short_names_only_when_unique():
    assert cluster_from_text("h100").devices[0].kind.name == "h100-80g"
    assert cluster_from_text("H200").devices[0].kind.name == "h200-141g"
    for text, hint in (("a100", "a100-40g, a100-80g, a100-pcie"), ("2xdgx-a100", "dgx-a100-80g")):
        with pytest.raises(UsageError, match="several kinds") as caught:
            cluster_from_text(text)
        assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("4xv100-61g", "did you mean 'v100-16g'?"),
        ("dgx1-v10", "did you mean 'dgx1-v100'?"),
        ("zzzz", "known: "),
        ("", "4xv100-16g"),
        ("h100+", "4xv100-16g"),
    ],
)
def test_shorthand_refuses_unknown_names_with_a_hint(text, hint):
    with pytest.raises(UsageError) as caught:
        cluster_from_text(text)
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["0xt4", "100001xt4", "99999xdgx2", "60000xt4+60000xl4"])
def test_shorthand_refuses_counts_out_of_bounds_quickly(text):
    start = time.process_time()
    with pytest.raises(UsageError, match="100000"):
        cluster_from_text(text)
    assert time.process_time() - start < 2


def test_shorthand_reads_files_by_path_alone_or_counted(tmp_path, monkeypatch):
    path = tmp_path / "mine.toml"
    path.write_text(cluster_to_toml(cluster_from_text("2xl4")), encoding="utf-8")
    assert cluster_from_text(str(path)).num_devices == 2
    monkeypatch.chdir(tmp_path)
    joined = cluster_from_text("3xmine.toml+1xt4")
    assert joined.num_devices == 7
    assert joined.hosts == ("host0", "host1", "host2", "host3")
    with pytest.raises(InputFileError, match="no such file") as caught:
        cluster_from_text("absent.toml")
    assert caught.value.exit_code == 3


def test_shorthand_reads_existing_files_of_any_name(tmp_path):
    path = tmp_path / "cluster"
    path.write_text('[[devices]]\nkind = "t4"\n', encoding="utf-8")
    assert cluster_from_text(str(path)).devices[0].kind.name == "t4"


def write_kinds(folder, file, **peaks):
    """A file with one device of each kind; names are those of the kinds, ``__`` stands for @."""
    kinds = {name.replace("__", "@"): rate for name, rate in peaks.items()}
    text = "".join(
        f'[kinds."{name}"]\nmemory = "1GiB"\nmemory_bandwidth = "1GB/s"\nsource = "{file}"\n'
        f'peak = {{ float32 = "{rate}TFLOP/s" }}\nhost_link = {{ bandwidth = "9GB/s" }}\n'
        f'[[devices]]\nkind = "{name}"\n'
        for name, rate in kinds.items()
    )
    (folder / f"{file}.toml").write_text(text, encoding="utf-8")


def rates_and_kinds(text):
    cluster = cluster_from_text(text)
    again = cluster_from_dict(cluster_to_dict(cluster))
    assert again.content_hash == cluster.content_hash
    assert again.devices == cluster.devices
    assert cluster_from_dict(tomllib.loads(cluster_to_toml(cluster))).devices == cluster.devices
    return (
        [device.kind.peak_flops["float32"] / 1e12 for device in cluster.devices],
        [device.kind.name for device in cluster.devices],
    )


def test_joined_kinds_of_one_name_keep_their_own_figures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_kinds(tmp_path, "fast", gpu=50)
    write_kinds(tmp_path, "slow", gpu=5)
    write_kinds(tmp_path, "same", gpu=50)
    assert rates_and_kinds("1xfast.toml+1xslow.toml") == ([50, 5], ["gpu", "gpu@host1"])
    assert rates_and_kinds("slow.toml+fast.toml") == ([5, 50], ["gpu", "gpu@host1"])
    assert rates_and_kinds("fast.toml+same.toml") == ([50, 50], ["gpu", "gpu"])
    assert rates_and_kinds("fast.toml+2xslow.toml+same.toml") == (
        [50, 5, 5, 50],
        ["gpu", "gpu@host1", "gpu@host1", "gpu"],
    )


def test_joined_kinds_never_take_a_name_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    long = "g" * 128
    write_kinds(tmp_path, "one", gpu=1, **{"gpu__host1": 2, long: 3, "t4": 4})
    write_kinds(tmp_path, "two", gpu=5, **{"gpu__host1": 6, long: 7})
    rates, kinds = rates_and_kinds("one.toml+two.toml+1xt4")
    assert rates == [1, 2, 3, 4, 5, 6, 7, 8.1]
    assert kinds == [
        "gpu", "gpu@host1", long, "t4",
        "gpu@host1#2", "gpu@host1@host1", "g" * 122 + "@host1", "t4@host2",
    ]  # fmt: skip


def test_shorthand_refuses_to_join_hardware_with_stated_times(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster = stated_cluster({"cluster": {"accelerators": 2}})
    (tmp_path / "own.toml").write_text(cluster_to_toml(cluster), encoding="utf-8")
    assert cluster_from_text("1xown.toml").uses_stated_times
    with pytest.raises(UsageError, match="cannot be joined") as caught:
        cluster_from_text("2xown.toml")
    assert "uses_stated_times" in caught.value.hint


def test_shorthand_of_4096_devices_takes_well_under_two_seconds():
    start = time.process_time()  # other work on the machine does not count
    cluster = cluster_from_text("512xdgx-a100-80g")
    elapsed_s = time.process_time() - start
    assert cluster.num_devices == 4096
    assert elapsed_s < 1.0
    assert len(set(cluster.device_names)) == 4096


terms = st.tuples(st.integers(1, 3), st.sampled_from([*preset_kinds(), *machine_names()]))


@given(st.lists(terms, min_size=1, max_size=3))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_shorthand_gives_valid_clusters_that_round_trip(parts):
    text = "+".join(f"{count}x{name}" for count, name in parts)
    cluster = cluster_from_text(text)
    wanted = sum(count * cluster_from_text(name).num_devices for count, name in parts)
    assert cluster.num_devices == wanted
    assert cluster.name == text
    assert (cluster.routes.bandwidth_bps > 0).all()
    assert cluster_from_dict(cluster_to_dict(cluster)).content_hash == cluster.content_hash


@given(st.text("0123456789x+-.gvhlt \0é/", max_size=20))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_shorthand_never_fails_otherwise_than_by_refusing(text):
    exit_code = 0
    try:
        cluster_from_text(text)
    except HocketError as error:
        exit_code = error.exit_code
    assert exit_code in (0, 2, 3)


def test_some_devices_of_a_machine_are_chosen_by_name_or_kind(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        '[[devices]]\nkind = "rtx3090"\nname = "big"\n[[devices]]\nkind = "t4"\ncount = 2\n'
    )
    chosen = cluster_from_text(f"{file}:big")
    assert chosen.device_names == ("big",)
    assert chosen.name == f"{file}:big"
    assert cluster_from_text(f"{file}:t4").num_devices == 2
    both = cluster_from_text("dgx1-v100:gpu0, gpu3")
    assert both.device_names == ("gpu0", "gpu3")
    whole = cluster_from_text("dgx1-v100").routes.bandwidth_bps
    assert both.routes.bandwidth_bps[0, 1] == whole[0, 3]
    for text, hint in ((f"{file}:bigg", "big"), ("dgx1-v100:", "gpu0"), ("dgx1-v100:gpu9", "gpu")):
        with pytest.raises(UsageError, match="has no device") as caught:
            cluster_from_text(text)
        assert hint in caught.value.hint
