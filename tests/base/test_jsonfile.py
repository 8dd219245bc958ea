"""JSON is read with limits and written the same every time."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import InputFileError
from hocket.base.jsonfile import MAX_DEPTH, dump_json, parse_json, read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@settings(derandomize=True, deadline=None)
@given(VALUES)
def test_json_survives_a_round_trip(value):
    data = dump_json(value)
    assert parse_json(data, "x") == value
    assert data.isascii()
    assert dump_json(parse_json(data, "x")) == data


def test_json_text_does_not_depend_on_the_order_of_keys():
    assert dump_json({"b": 1, "a": [0.1, 1e300]}) == b'{"a":[0.1,1e+300],"b":1}\n'


def test_dump_json_refuses_numbers_that_json_does_not_have():
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump_json([float("nan")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b"[-Infinity]", "-Infinity is not a JSON number"),
        (b'{"a": {"b": 1, "b": 2}}', "the key 'b' occurs twice"),
        (b'{"a": 1 2}', "line 1, column 9"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
        (b"[" * 100_000, "nested deeper than 64"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested deeper than 64"),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "nested deeper than 64"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b"[" * 5_000_000, "more than 4000000 lists and objects"),
    ],
)
def test_parse_json_refuses(text, message):
    with pytest.raises(InputFileError) as caught:
        parse_json(text, "file.json")
    assert message in caught.value.message
    assert caught.value.where == "file.json"
    assert caught.value.hint


def test_parse_json_accepts_the_deepest_nesting_allowed():
    assert parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, "x")


def test_read_json_knows_gzip_by_content_not_by_name(tmp_path):
    (tmp_path / "packed.json").write_bytes(gzip.compress(b'{"a": 1}'))
    (tmp_path / "plain.gz").write_bytes(b' \n{"a": 1}')
    assert read_json(tmp_path / "packed.json") == read_json(tmp_path / "plain.gz") == {"a": 1}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_read_json_stops_at_the_size_limit_also_after_decompression(tmp_path, pack):
    text = json.dumps(["x" * 60_000] * 40).encode()
    (tmp_path / "a").write_bytes(pack(text))
    assert read_json(tmp_path / "a", max_bytes=len(text)) == json.loads(text)
    with pytest.raises(InputFileError, match="more than 1000000 bytes"):
        read_json(tmp_path / "a", max_bytes=1_000_000)
