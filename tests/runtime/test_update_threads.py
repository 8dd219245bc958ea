"""Threads of updates on the host when Python ends."""

import threading
import weakref
from types import SimpleNamespace

from patience import PATIENCE_S

from hocket.runtime.memory import updates as host
from hocket.runtime.memory.updates import HostUpdates, end_all


def test_what_is_under_way_is_ended_before_python_ends(monkeypatch):
    # Threads of other tests go on.
    monkeypatch.setattr(host, "_running", weakref.WeakKeyDictionary())
    updates, done = HostUpdates(is_idle=False), []
    begun, gate = threading.Event(), threading.Event()
    block = SimpleNamespace(updated=threading.Event(), index=0)
    block.updated.set()

    def job():
        begun.set()
        gate.wait(PATIENCE_S)
        done.append(block)

    updates.ask(block, job)
    assert begun.wait(PATIENCE_S)
    ending = threading.Thread(target=end_all)
    ending.start()
    assert ending.is_alive(), "the end waits for the job"
    gate.set()
    ending.join(PATIENCE_S)
    assert done == [block]
    assert not updates._thread.is_alive()
