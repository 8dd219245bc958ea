"""Frames arrive as they were sent, however they are cut on the way."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.processes.frames import FrameReader, FrameWriter

FRAMES = st.lists(
    st.tuples(
        st.dictionaries(st.text(max_size=5).filter(lambda k: k != "sizes"), st.integers()),
        st.lists(st.binary(max_size=40), max_size=5),
    ),
    max_size=5,
)


@pytest.fixture(scope="module")
def between():
    """A pipe whose ends do not block, and a way to cut what goes through it."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    yield ends
    for end in ends:
        os.close(end)


@given(frames=FRAMES, cut=st.integers(1, 64))
@settings(max_examples=60, deadline=None)
def test_frames_survive_any_cut(between, frames, cut):
    read_end, write_end = between
    first, last = os.pipe()
    try:
        writer = FrameWriter(last)
        for header, buffers in frames:
            writer.put(header, buffers)
        writer.flush()
        assert writer.is_empty
        os.close(last)
        reader, found = FrameReader(read_end), []
        while piece := os.read(first, cut):
            os.write(write_end, piece)
            while (frame := reader.read()) is not None:
                found.append((frame.header, list(map(bytes, frame.buffers))))
    finally:
        os.close(first)
    assert found == frames
    assert not reader.is_closed


def test_an_end_that_is_closed_in_the_middle_gives_no_frame():
    read_end, write_end = os.pipe()
    writer = FrameWriter(write_end)
    writer.put({"a": 1}, [b"1234"])
    whole = b"".join(writer._waiting)
    os.write(write_end, whole[:-1])
    os.close(write_end)
    reader = FrameReader(read_end)
    assert reader.read() is None
    assert reader.read() is None
    assert reader.is_closed
    os.close(read_end)


def test_what_is_no_frame_is_refused():
    read_end, write_end = os.pipe()
    os.write(write_end, b"Traceback (most recent call last)")
    os.close(write_end)
    with pytest.raises(ValueError, match="no frame begins with"):
        FrameReader(read_end).read()
    os.close(read_end)
