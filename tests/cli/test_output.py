"""What commands say while they work."""

import io
import time

from hocket.cli import output


def test_work_that_takes_minutes_says_how_far_it_is_where_nobody_watches(monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)
    monkeypatch.setattr(output, "SPOKEN_EVERY_S", 0.01)
    stop_s = time.monotonic() + 120
    with output.working("building") as tell:
        for text in ("building", "step 2 of 3"):
            tell(text)
            while f"{text} (" not in said.getvalue():
                assert time.monotonic() < stop_s
    length = len(said.getvalue())
    time.sleep(0.05)
    assert len(said.getvalue()) == length, "nothing is said afterwards"


def test_short_work_says_nothing_where_nobody_watches(monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)
    with output.working("reading") as tell:
        tell("nearly done")
    assert not said.getvalue()
