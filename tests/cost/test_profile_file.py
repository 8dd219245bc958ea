import json
from dataclasses import replace

import pytest
from cost.cost_samples import entry_of, graph_of, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import InputFileError, UsageError
from hocket.cost.calibrate import Calibration, write_calibration
from hocket.cost.efficiency import Efficiency, KindFit
from hocket.cost.host import HostOverhead
from hocket.cost.profile import (
    merge_profiles,
    profile_from_dict,
    profile_to_dict,
    read_profile,
    with_measured_workspace,
    write_profile,
)


def sample():
    host = HostOverhead(forward_s=0.1 + 0.2, backward_s=1e-6, optimizer_s=0.0, overlaps=True)
    entries = [entry_of("b ☃", 1e-3, workspace_bytes=5), entry_of("a", 1 / 3, count=7)]
    return replace(
        profile_of(entries, host), reserved_bytes=2**25, missing={"c": "RuntimeError: no"}
    )


def test_profile_file_round_trips_and_is_deterministic(tmp_path):
    profile = sample()
    write_profile(profile, tmp_path / "one.json")
    again = read_profile(tmp_path / "one.json")
    assert profile_to_dict(again) == profile_to_dict(profile)
    assert again.entries == profile.entries
    assert again.host == profile.host
    write_profile(again, tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


@pytest.mark.parametrize(
    ("path", "value", "message", "hint"),
    [
        (("sechma",), 1, "unknown key 'sechma' in the profile", "did you mean 'schema'?"),
        (("schema",), "profile", "schema is 'profile'", "'hocket.profile/1'"),
        (
            ("schema",),
            "hocket.profile/2",
            "this is a hocket.profile/2 file, expected hocket.profile/1",
            "hocket profile",
        ),
        (("device_kind",), None, "device_kind is None", "expected a text"),
        (("entries",), {}, "entries is {}", "expected a list"),
        (("entries", 0), "x", "entries[0] is 'x'", "expected an object with the keys signature"),
        (("entries", 0, "secs"), 1, "unknown key 'secs' in entries[0]", "'seconds'"),
        (("entries", 1, "seconds"), "1", "entries[1].seconds is '1'", "a number from 0"),
        (("entries", 1, "seconds"), -1e-9, "entries[1].seconds is -1e-09", "a number from 0"),
        (("entries", 1, "seconds"), float("nan"), "entries[1].seconds is nan", "a number from 0"),
        (("entries", 0, "count"), 0, "entries[0].count is 0", "an integer from 1"),
        (("entries", 0, "count"), 1.0, "entries[0].count is 1.0", "an integer from 1"),
        (
            ("entries", 0, "bytes_touched"),
            2**60,
            "entries[0].bytes_touched is",
            "an integer from 0",
        ),
        (("entries", 0, "dtype"), "float31", "entries[0].dtype is 'float31'", "mean 'float32'?"),
        (("entries", 0, "signature"), "b ☃", "signature 'b ☃' occurs twice in entries", "keep one"),
        (("host", "forward_s"), True, "host.forward_s is True", "a number from 0"),
        (("versions",), {"torch": 2}, "versions.torch is 2", "expected a text"),
        (("missing",), {"a b": 2}, "missing['a b'] is 2", "expected a text"),
    ],
)
def test_profile_file_refuses_what_it_does_not_know(path, value, message, hint):
    data = json.loads(json.dumps(profile_to_dict(sample())))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InputFileError) as caught:
        profile_from_dict(data, "p.json")
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.where == "p.json"


@pytest.mark.parametrize("key", ["schema", "device_kind", "host", "entries", "versions"])
def test_profile_file_names_the_missing_key(key):
    data = profile_to_dict(sample())
    del data[key]
    with pytest.raises(InputFileError, match=f"the profile has no key '{key}'") as caught:
        profile_from_dict(data, "p.json")
    assert caught.value.hint == f"add '{key}'"


def test_profile_file_names_the_sort_of_file_that_it_was_given(tmp_path):
    fit = KindFit({"copy": Efficiency(0.5, 0.5)}, 1e-6)
    write_calibration(Calibration({"tesla": fit}), tmp_path / "cal.json")
    with pytest.raises(InputFileError) as caught:
        read_profile(tmp_path / "cal.json")
    assert caught.value.message == "this is a hocket.calibration/1 file, expected hocket.profile/1"
    assert "--calibration" in caught.value.hint
    assert caught.value.where == str(tmp_path / "cal.json")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=100)
def test_profile_file_gives_a_profile_or_an_input_error_for_anything(data):
    mutated = json.loads(json.dumps(profile_to_dict(sample())))
    place = mutated
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else [0]))
        if isinstance(place[key], (dict, list)) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = data.draw(values)
        break
    try:
        profile = profile_from_dict(mutated, "p.json")
    except InputFileError:
        return
    assert profile_to_dict(profile_from_dict(profile_to_dict(profile), "p.json")) == (
        profile_to_dict(profile)
    )


def test_merged_profiles_add_counts_and_keep_first_times():
    first = profile_of([entry_of("a", 1.0, count=2)])
    second = replace(
        profile_of([entry_of("a", 5.0, count=3), entry_of("b", 2.0)]), missing={"a": "", "z": "no"}
    )
    merged = merge_profiles([first, second])
    assert [(e.signature, e.seconds, e.count) for e in merged.entries] == [
        ("a", 1.0, 5),
        ("b", 2.0, 1),
    ]
    assert merged.missing == {"z": "no"}
    with pytest.raises(UsageError, match="'tesla' and 'xeon'"):
        merge_profiles([first, profile_of([], kind="xeon")])


def test_measured_workspace_replaces_what_the_graph_says():
    graph = graph_of(
        [
            {"signature": "a", "workspace_bytes": 1},
            {"signature": "b", "workspace_bytes": 2},
            {"workspace_bytes": 3},
        ]
    )
    profile = profile_of([entry_of("a", 1.0, workspace_bytes=100)])
    assert with_measured_workspace(graph, profile).workspace_bytes.tolist() == [100, 2, 3]
