"""README and the pages of docs/, and the commands that they show.

A command is a line that starts with ``hocket`` in an indented block or behind ``$``. A comment
``<!-- not run: long -->`` above a block says why its commands are not run here,
``<!-- not run: long: 2, 3 -->`` says so of its second and third; what people copy has no marks.
``HOCKET_PAGES=long`` runs the long ones, too.
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
_NOT_RUN = re.compile(r"^<!-- not run: (\w+)(?:: ([\d, ]+))? -->$")
_COMMAND = re.compile(r"^(?:    (?:\$ )?|\$ )(hocket .*)$")


class Command(NamedTuple):
    """A command of a page."""

    line: int
    arguments: list[str]
    mark: str | None

    @property
    def is_run(self):
        """True if the tests run it."""
        return self.mark in {None, os.environ.get("HOCKET_PAGES")}


def commands(page):
    """The commands of a page, in order."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " \\ ")
    found, notes, count, in_fence = [], {}, 0, False
    for number, line in enumerate(text.split("\n"), 1):
        if noted := _NOT_RUN.match(line):
            # None stands for all commands of the block.
            which = [int(each) for each in noted[2].split(",")] if noted[2] else [None]
            notes.update(dict.fromkeys(which, noted[1]))
            continue
        if line.startswith("```"):
            in_fence = not in_fence
            notes, count = (notes, 0) if in_fence else ({}, 0)
            continue
        if line.strip() and not in_fence and not line.startswith("    "):
            notes, count = {}, 0
        if (match := _COMMAND.match(line)) is None:
            continue
        count += 1
        command = match[1].replace(" \\ ", " ").partition(" # ")[0]
        found.append(Command(number, shlex.split(command)[1:], notes.get(count, notes.get(None))))
    return found


def group_of(page):
    """The test file that runs a page: the files run in parallel, each with its part."""
    stem = page.stem.partition("_")[0]
    return stem if stem in {"README", "fleet", "parallelism"} else "others"


def pages_of(wanted):
    """The pages of a group that have commands to run."""
    return [p for p in PAGES if group_of(p) == wanted and any(c.is_run for c in commands(p))]


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
