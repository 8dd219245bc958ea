"""Values of untrusted files are taken whole and right, or refused by name in a short message."""

import time
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base import fields
from hocket.base.errors import InputFileError

HUGE = "k" * 5_000_000


def refused(read, *arguments, **options) -> InputFileError:
    with pytest.raises(InputFileError) as caught:
        read(*arguments, **options)
    assert caught.value.hint
    assert not caught.value.message.endswith(".")
    return caught.value


# ── places and errors ────────────────────────────────────────────────────────────────────────────


def test_located_adds_the_file_and_keeps_a_place_that_is_known_better():
    def read(where):
        with fields.located("outer.json"), fields.located(where):
            raise fields.wrong("ops.flops", -1, "more")

    assert str(refused(read, "")) == "outer.json: ops.flops is -1\nhint: expected more"
    assert refused(read, "inner.json").where == "inner.json"


def test_inside_joins_plain_names_and_quotes_all_others():
    assert fields.inside("kinds", "v100-16g") == "kinds.v100-16g"
    assert fields.inside("kinds", "a.b") == "kinds['a.b']"
    assert fields.inside("kinds", "") == "kinds['']"
    assert fields.inside("kinds", 7) == "kinds[7]"
    assert fields.inside("kinds", "line\nbreak") == r"kinds['line\nbreak']"
    assert len(fields.inside("kinds", HUGE)) < 100


def nested(depth: int) -> list:
    return [nested(depth - 1) if depth else "x" * 100 for _ in range(6)]


# By name, because pytest writes values into the names of tests.
LARGE = {
    "text": HUGE,
    "escapes": "\0" * 10**6,
    "integer": 10**400,
    "integer that Python does not write": [10**5000],
    "nested lists": nested(5),
    "object": {HUGE: HUGE},
    "list": [HUGE] * 9,
    "other mapping": MappingProxyType({HUGE: 1}),
}


@pytest.mark.parametrize("name", LARGE)
def test_shown_is_short_and_on_one_line_whatever_the_value(name):
    text = fields.shown(LARGE[name])
    assert 0 < len(text) <= fields.MAX_SHOWN
    assert text.isprintable()


@pytest.mark.parametrize("value", ["hocket.graph/2", 5, -1e-9, None, True, [1], {}, {"a": 1}])
def test_shown_keeps_small_values_as_they_are(value):
    assert fields.shown(value) == repr(value)


# ── objects and lists ────────────────────────────────────────────────────────────────────────────


def test_record_takes_objects_with_the_required_keys_and_any_optional_ones():
    for value in ({"a": 1}, {"a": 1, "b": 2}, MappingProxyType({"b": 2, "a": 1})):
        assert fields.record(value, "x", required=("a",), optional=("b",)) is value


def test_record_names_the_key_that_is_unknown_or_missing():
    def read(value):
        return refused(fields.record, value, "ops", required=("flops",), optional=("name",))

    error = read({"flops": 1, "nam": 2})
    assert (error.message, error.hint) == ("unknown key 'nam' in ops", "did you mean 'name'?")
    error = read({"flops": 1, 7: 2})
    assert (error.message, error.hint) == ("unknown key 7 in ops", "known: flops, name")
    error = read({"name": 2})
    assert (error.message, error.hint) == ("ops has no key 'flops'", "add 'flops'")
    error = read([])
    assert error.message == "ops is []"
    assert error.hint == "expected an object with the keys flops, name"


def test_record_lists_only_some_of_many_keys():
    error = refused(fields.record, 1, "x", optional=[f"key{i}" for i in range(1000)])
    assert error.hint.endswith("key11, …")


def test_huge_keys_and_values_are_refused_quickly_and_shortly():
    start = time.process_time()
    known = [f"key{i}" for i in range(100)]
    for error in (
        refused(fields.record, {HUGE: 1}, "x", optional=known),
        refused(fields.record, HUGE, "x", required=["a"]),
        refused(fields.choice, HUGE, "x", known),
        refused(fields.choice, HUGE, "x", ["only"]),
        refused(fields.number, HUGE, "x", 0, 1),
        refused(fields.int_column, [HUGE], "x", 0, 1),
    ):
        assert len(str(error)) < 300
    assert time.process_time() - start < 2


@pytest.mark.parametrize("value", [[], "a", None, 1, {1: "a"}])
def test_mapping_takes_only_objects_whose_keys_are_texts(value):
    assert fields.mapping({"any": 1, "": 2}, "x") == {"any": 1, "": 2}
    assert "an object of names" in refused(fields.mapping, value, "x").hint


@pytest.mark.parametrize("value", [{}, "abc", None, 1, (1, 2)])
def test_items_takes_only_lists(value):
    assert fields.items([1, "a"], "x") == [1, "a"]
    assert refused(fields.items, value, "x").hint == "expected a list"


def test_sized_counts_the_entries():
    assert fields.sized([1, 2], "x", 2, "one per op") == [1, 2]
    error = refused(fields.sized, [1, 2], "x", 3, "one per op")
    assert (error.message, error.hint) == ("x has 2 entries, expected 3", "one per op")


# ── single values ────────────────────────────────────────────────────────────────────────────────


def test_text_takes_only_texts():
    assert fields.text("", "x") == ""
    for value in (None, 1, True, ["a"], b"a"):
        assert "expected a text" in refused(fields.text, value, "x").hint


def test_choice_suggests_what_is_similar_or_lists_what_is_known():
    known = ("float32", "int8")
    assert fields.choice("int8", "dtype", known) == "int8"
    error = refused(fields.choice, "float31", "dtype", known)
    assert (error.message, error.hint) == ("dtype is 'float31'", "did you mean 'float32'?")
    for value in ("qqq", 5, None, ["int8"], {"int8": 1}):
        assert refused(fields.choice, value, "dtype", known).hint == "known: float32, int8"
    for value in ("hocket.graph/2", 5):
        error = refused(fields.choice, value, "schema", ("hocket.graph/1",))
        assert error.hint == "expected 'hocket.graph/1'"


NO_NUMBERS = [True, False, None, "1", [1], float("nan"), float("inf"), -float("inf"), 10**400]


@pytest.mark.parametrize("value", [*NO_NUMBERS, 1.0, 0, 6])
def test_integer_refuses_what_is_none_or_out_of_bounds(value):
    assert [fields.integer(n, "x", 1, 5) for n in (1, 5)] == [1, 5]
    error = refused(fields.integer, value, "x", 1, 5)
    assert error.message.startswith("x is ")
    assert error.hint == "expected an integer from 1 to 5"


@pytest.mark.parametrize("value", [*NO_NUMBERS, 0.99, 5.01, -1])
def test_number_refuses_what_is_none_or_out_of_bounds(value):
    assert [fields.number(n, "x", 1, 5) for n in (1, 5.0, np.float64(2))] == [1.0, 5.0, 2.0]
    assert type(fields.number(1, "x", 1, 5)) is float
    error = refused(fields.number, value, "x", 1, 5)
    assert error.message.startswith("x is ")
    assert error.hint == "expected a number from 1 to 5"


@pytest.mark.parametrize("value", [2, -1, 1.0, "true", None, [], float("nan")])
def test_flags_refuse_all_but_true_and_false(value):
    for flag in (True, False):
        assert fields.flag(flag, "x") is fields.flag_or_bit(flag, "x") is flag
        assert fields.flag_or_bit(int(flag), "x") is flag
        assert refused(fields.flag, int(flag), "x").hint == "expected true or false"
    for read in (fields.flag, fields.flag_or_bit):
        assert refused(read, value, "x").hint == "expected true or false"


# ── columns ──────────────────────────────────────────────────────────────────────────────────────


def one_by_one(check, entries, *bounds):
    """The message of the first entry that ``check`` refuses, or the values."""
    try:
        return [check(entry, f"x[{index}]", *bounds) for index, entry in enumerate(entries)]
    except InputFileError as error:
        return str(error)


def as_a_whole(column, entries, *bounds):
    try:
        return list(column(entries, "x", *bounds))
    except InputFileError as error:
        return str(error)


ENTRIES = st.lists(
    st.integers(-1, 11) | st.floats() | st.booleans() | st.none() | st.text(max_size=2)
    | st.sampled_from([2**63, 10**30, 10**400, -0.0])
)  # fmt: skip
COLUMNS = st.lists(st.integers(-1, 11)) | st.lists(st.floats(0, 10)) | ENTRIES


@given(COLUMNS)
@settings(derandomize=True, deadline=None, max_examples=300)
def test_columns_agree_with_their_entries_read_one_by_one(entries):
    for column, check, *bounds in (
        (fields.int_column, fields.integer, 0, 10),
        (fields.float_column, fields.number, 0, 10),
        (fields.text_column, fields.text),
    ):
        assert as_a_whole(column, entries, *bounds) == one_by_one(check, entries, *bounds)


def test_columns_are_arrays_of_64_bits_even_when_empty():
    assert fields.int_column([], "x", 0, 1).dtype == np.int64
    assert fields.float_column([], "x", 0, 1).dtype == np.float64
    assert fields.float_column([1, 0], "x", 0, 1).dtype == np.float64
    for column in (fields.int_column, fields.float_column):
        assert refused(column, {}, "x", 0, 1).hint == "expected a list"
