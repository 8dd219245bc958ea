"""What every test of processes must leave: nothing."""

import psutil
import pytest


@pytest.fixture(autouse=True)
def nothing_left():
    me = psutil.Process()
    before, children = me.num_fds(), me.children(recursive=True)
    yield
    assert [child for child in me.children(recursive=True) if child not in children] == []
    assert me.num_fds() <= before
