import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base import units


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bytes, "16GiB", 16 * 2**30),
        (units.parse_bytes, "12 GB", 12_000_000_000),
        (units.parse_bytes, "1.5KiB", 1536),
        (units.parse_bytes, "0", 0),
        (units.parse_bandwidth, "25GB/s", 25e9),
        (units.parse_bandwidth, "100Gbit/s", 12.5e9),
        (units.parse_seconds, "134us", 134e-6),
        (units.parse_seconds, "1.5 ms", 1.5e-3),
        (units.parse_flops, "312TFLOP/s", 312e12),
    ],
)
def test_quantities_are_read_as_people_write_them(parse, text, value):
    assert parse(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (units.parse_bytes, "16"),
        (units.parse_bytes, "16 Gb"),
        (units.parse_bytes, "-1GiB"),
        (units.parse_bytes, "nanGiB"),
        (units.parse_bandwidth, "25GB"),
        (units.parse_seconds, "10"),
        (units.parse_seconds, "10 parsecs"),
        (units.parse_flops, "3 TB/s"),
        (units.parse_bytes, ""),
        (units.parse_bytes, "1e400GiB"),
        (units.parse_bytes, "9e18GiB"),
        (units.parse_seconds, "1e400s"),
        (units.parse_bandwidth, "1e999GB/s"),
        (units.parse_flops, "1e999TFLOP/s"),
    ],
)
def test_wrong_units_are_refused_with_the_text(parse, text):
    with pytest.raises(ValueError, match="is not a"):
        parse(text)


@given(st.integers(0, 2**52))
@settings(derandomize=True)
def test_formatted_bytes_read_back_within_their_digits(size):
    text = units.format_bytes(size)
    assert units.parse_bytes(text) == pytest.approx(size, rel=0.06, abs=0.5)


@given(st.integers(0, 2**52))
@settings(derandomize=True)
def test_typed_bytes_are_enough_and_hardly_more(size):
    enough = units.parse_bytes(units.typed_bytes(size))
    assert size <= enough <= size + max(0.1 * size, 1)
    assert units.typed_bytes(300 * 2**20) == "300MiB"


@given(st.integers(0, 2**52), st.integers(0, 2**12))
@settings(derandomize=True)
def test_sizes_that_differ_read_apart(size, more):
    one, other = units.format_apart(size, size + more)
    assert (one == other) == (not more)
    assert units.format_apart(788748, 788744) == ("788,748 B", "788,744 B")


@given(st.floats(1e-9, 1e6))
@settings(derandomize=True)
def test_formatted_seconds_read_back_within_three_digits(duration_s):
    text = units.format_seconds(duration_s)
    assert units.parse_seconds(text) == pytest.approx(duration_s, rel=0.0051)


def test_formats_are_short():
    assert units.format_bytes(0) == "0 B"
    assert units.format_bytes(27.1 * 2**30) == "27.1 GiB"
    assert units.format_seconds(0.412) == "412 ms"
    assert units.format_seconds(0) == "0 s"
    assert [units.format_seconds(s, 0.593) for s in (0.593, 1.31, 12.3)] == [
        "593 ms", "1310 ms", "12300 ms",
    ]  # fmt: skip
    assert units.format_seconds(float("inf")) == "∞"
    assert units.format_rate(25e9, "B/s") == "25 GB/s"
    assert [units.format_count(n) for n in (0, 9.54, 231.84, 6236.0, 1.25e6)] == [
        "0", "9.54", "232", "6,240", "1,250,000",
    ]  # fmt: skip
    assert units.format_rate(3.35e12, "B/s") == "3.35 TB/s"


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("007", 7), ("4096", 4096), ("4097", None), ("", None), ("-1", None), ("1.0", None),
     ("٣", None), ("²", None), ("9" * 5000, None), ("0" * 5000 + "9", 9)],
)  # fmt: skip
def test_whole_numbers_are_plain_digits_up_to_a_limit(text, number):
    assert units.whole_number(text, 4096) == number


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (89, "89 s"),
        (90, "2 min"),
        (300, "5 min"),
        (5400, "1.5 h"),
        (36000, "10 h"),
        (86400, "24 h"),
        (6e5, "7 days"),
        (float("inf"), "an unknown time"),
    ],
)
def test_durations_as_people_say_them(seconds, words):
    assert units.words_for_seconds(seconds) == words
