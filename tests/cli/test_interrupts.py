"""Ctrl-C at any time, and terminals that cannot write every character."""

import json
import os
import subprocess
import sys
from dataclasses import replace

from cli.terminal import PLAIN

from hocket.graph.files import write_graph
from hocket.graph.generators import generate


def python(script, **environment):
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=False,
        env={**os.environ, **PLAIN, **environment},
    )  # fmt: skip


INTERRUPTED_IMPORT = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "hocket.cli.root":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
from hocket.__main__ import main
main()
"""

SWALLOWED = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import hocket.graph.generators as g
class Tensor:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
def work(*_):
    tensor = Tensor()
    del tensor
    time.sleep(50)
g.generate = work
import sys
sys.argv = ["hocket", "generate", "chain", "-o", "never.json"]
from hocket.__main__ import main
main()
"""


def test_an_interrupt_while_modules_are_imported_ends_without_a_traceback():
    done = python(INTERRUPTED_IMPORT)
    assert (done.returncode, done.stdout) == (130, b"")
    assert done.stderr == b"hocket: interrupted\n"


def test_little_is_imported_before_an_interrupt_is_understood():
    loads = "import sys; before = set(sys.modules); import hocket.__main__; "
    done = python(f"{loads}print(*sorted(set(sys.modules) - before))")
    assert set(done.stdout.decode().split()) <= {"__future__", "hocket", "hocket.__main__"}


def test_an_interrupt_that_a_destructor_swallows_comes_again():
    done = python(SWALLOWED)
    assert done.returncode == 130
    assert done.stderr.strip() == b"hocket: interrupted"


def test_a_terminal_without_unicode_gets_question_marks_and_json_loses_nothing(tmp_path):
    path = tmp_path / "g.json"
    write_graph(replace(generate("chain", 3, 0), name="größer → ✔"), path)
    for encoding in ("latin-1", "ascii"):
        where = f"'--on', '1xt4', '--planner', 'm-topo', '-o', {str(tmp_path / 'p.json')!r}"
        plan = f"['plan', {str(path)!r}, {where}]"
        script = f"from hocket.cli import main\nmain({plan})"
        done = python(script, PYTHONIOENCODING=encoding)
        assert done.returncode == 0, done.stderr
        assert b"?" in done.stdout
        told = python(script.replace("])", ", '--json'])"), PYTHONIOENCODING=encoding)
        assert json.loads(told.stdout.decode(encoding))["graph"]["name"] == "größer → ✔"
