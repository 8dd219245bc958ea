"""README and the pages of docs/, and the commands that they show.

A command is a line that starts with ``hocket`` in an indented block or behind ``$``. The comment at
its end may begin with a word in brackets that says why it is not run here; a line
``<!-- not run: long -->`` says so for the block that follows it. ``HOCKET_PAGES=long`` runs the
long ones, too.
"""

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

from cli.terminal import hocket
from forked_worker_group import forked_worker_groups

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKS = {"long", "GPU", "Ray", "Slurm", "service", "yours"}
_NOT_RUN = re.compile(r"^<!-- not run: (\w+) -->$")
_COMMAND = re.compile(r"^(?:    (?:\$ )?|\$ )(hocket .*)$")


class Command(NamedTuple):
    """A command of a page."""

    line: int
    arguments: list[str]
    mark: str | None

    @property
    def is_run(self):
        """Whether the tests run it."""
        return self.mark in {None, os.environ.get("HOCKET_PAGES")}


def commands(page):
    """The commands of a page, in order."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " \\ ")
    found = []
    of_block = None
    for number, line in enumerate(text.split("\n"), 1):
        if noted := _NOT_RUN.match(line):
            of_block = noted[1]
        elif line.strip() and not line.startswith("    "):
            of_block = None
        match = _COMMAND.match(line)
        if match is None:
            continue
        command, _, comment = match[1].replace(" \\ ", " ").partition(" # ")
        mark = re.match(r"\s*\[(\w+)\]", comment)
        found.append(Command(number, shlex.split(command)[1:], mark[1] if mark else of_block))
    return found


def room(page):
    """Which file of tests runs a page; they run beside each other, so each has its share."""
    stem = page.stem.partition("_")[0]
    return stem if stem in {"README", "fleet", "parallelism"} else "others"


def pages_of(wanted):
    """The pages of a room that have commands to run."""
    return [p for p in PAGES if room(p) == wanted and any(c.is_run for c in commands(p))]


def what_fails(page, folder):
    """Run the commands of a page in a folder that has the examples; what went wrong, in lines."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    found = []
    for command in commands(page):
        if not command.is_run:
            continue
        try:
            with forked_worker_groups():
                hocket(*command.arguments, cwd=folder)
        except AssertionError as error:
            typed = f"{page.name}:{command.line}: hocket {shlex.join(command.arguments)}"
            found += [typed, *str(error).splitlines()]
    return found
