"""README and the pages of docs/: their commands work as printed, in order.

A command is a line that starts with ``hocket`` in an indented block or behind ``$``. The comment at
its end may begin with a word in brackets that says why it is not run here. ``HOCKET_PAGES=long``
runs the long ones, too.
"""

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from cli.terminal import hocket

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKS = {"long", "GPU", "Ray", "Slurm", "service", "yours"}
_COMMAND = re.compile(r"^(?:    (?:\$ )?|\$ )(hocket .*)$")


def commands(page):
    """The commands of a page as (line number, arguments, mark)."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " \\ ")
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        match = _COMMAND.match(line)
        if match is None:
            continue
        command, _, comment = match[1].replace(" \\ ", " ").partition(" # ")
        mark = re.match(r"\s*\[(\w+)\]", comment)
        words = shlex.split(command)
        found.append((number, words[1:], mark[1] if mark else None))
    return found


def test_marks_are_known_words():
    for page in PAGES:
        for number, _, mark in commands(page):
            assert mark is None or mark in MARKS, f"{page.name}:{number}: [{mark}]"


def with_commands():
    wanted = {None, os.environ.get("HOCKET_PAGES")}
    return [page for page in PAGES if any(mark in wanted for _, _, mark in commands(page))]


@pytest.mark.timeout(600)  # many commands; the machine may be busy
@pytest.mark.parametrize("page", with_commands(), ids=lambda page: page.stem)
def test_the_commands_of_a_page_work_as_printed_in_order(page, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for number, arguments, mark in commands(page):
        if mark in (None, os.environ.get("HOCKET_PAGES")):
            try:
                hocket(*arguments, cwd=tmp_path)
            except AssertionError as error:
                command = f"{page.name}:{number}: hocket {shlex.join(arguments)}"
                raise AssertionError(f"{command}\n{error}") from None


def test_files_that_pages_name_in_examples_are_there():
    for page in PAGES:
        for name in re.findall(r"examples/[\w./-]*\w", page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{page.name} names {name}"
