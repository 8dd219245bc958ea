"""Programs of a worker group for tests: ``python -m processes.children DESCRIPTORS WHAT``."""

import os
import subprocess
import sys
import time

from hocket.processes.child import live, serve


def echo(asked):
    return asked.header, asked.buffers


def report_then_work(parent):
    parent.send({"modules": sorted(sys.modules)})


def count_in_one_piece(parent):
    parent.move(1)
    sum(range(parent.receive().header["count"]))  # no other thread gets a turn meanwhile


def fail(parent):
    parent.move(2)
    raise ValueError("no such thing\nwith a second line")


def lose_another(parent):
    error = RuntimeError("lost the other one")
    error.code = "communication"
    raise error


def leave(parent):
    sys.stderr.write("first words\nlast words\n")
    os._exit(3)


def leave_slowly(parent):
    """As on a busy machine: nothing more will be said, but it takes a while until it has ended."""
    os.close(parent._writer.descriptor)
    time.sleep(0.5)
    os._exit(3)


def print_without_end(parent):
    for _ in range(6):
        os.write(2, b"nonsense\n" * 500_000)
        parent.send({})
        parent.receive()
    os.write(1, b"the end\n")
    os._exit(4)


def print_a_line_in_pieces(parent):
    """The other process prints between the halves of this one's line."""
    sys.stdout.write("first ")
    parent.send({})
    parent.receive()
    sys.stdout.write("second\n")


def start_others(parent):
    """One child in this group, and one that went into a session of its own."""
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    found = [subprocess.Popen(sleeper), subprocess.Popen(sleeper, start_new_session=True)]
    parent.send({"pids": [one.pid for one in found]})
    time.sleep(600)


def sleep(parent):
    time.sleep(600)


WORKS = {
    work.__name__: work
    for work in (
        report_then_work, count_in_one_piece, fail, lose_another, leave, leave_slowly,
        print_without_end, print_a_line_in_pieces, start_others, sleep,
    )
}  # fmt: skip

if __name__ == "__main__":
    if sys.argv[2] == "echo":
        serve(echo)
    live(WORKS[sys.argv[2]])
