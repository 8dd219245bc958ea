"""What pages say of commands and examples can be understood and is there."""

import importlib
import re
import shlex
from pathlib import Path

import click
import pytest
from pages.pages import MARKS, PAGES, ROOT, commands, group_of, pages_of

from hocket.cli.root import root


def test_marks_are_known_words():
    for page in PAGES:
        for line, _, mark in commands(page):
            assert mark is None or mark in MARKS, f"{page.name}:{line}: [{mark}]"


def test_commands_and_options_that_pages_show_exist():
    for page in PAGES:
        for line, arguments, _ in commands(page):
            assert unknown_word(arguments) is None, f"{page.name}:{line}: {arguments}"


def unknown_word(arguments):
    """The first word of a command that names no command or option."""
    words, command = list(arguments), root
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        name = words.pop(0)
        found = command.get_command(click.Context(command), name)
        if found is None:
            if command.name != "calibrate":  # calibrate takes files, too
                return name
            break
        command = found
    if command.name == "calibrate" and isinstance(command, click.Group):
        command = command.commands["profiles"]  # what it does without a subcommand
    if command.name == "launch":  # what follows the script is the script's
        return None
    known = {"--help", *(name for each in command.params for name in each.opts)}
    known |= {name for each in command.params for name in each.secondary_opts}
    options = [word.partition("=")[0] for word in words if re.match(r"--\w", word)]
    return next((option for option in options if option not in known), None)


def test_every_page_is_run_by_a_file_of_tests():
    files = {path.stem for path in Path(__file__).parent.glob("test_*_commands.py")}
    assert files == {f"test_{group_of(page).lower()}_commands" for page in PAGES}
    assert {"README.md", "plan.md", "fleet.md", "parallelism.md"} <= {
        page.name for name in map(group_of, PAGES) for page in pages_of(name)
    }


@pytest.mark.parametrize(
    ("line", "arguments", "mark"),
    [
        ("    hocket show plan.json", ["show", "plan.json"], None),
        ("    $ hocket plan 'a b' -o x  # words", ["plan", "a b", "-o", "x"], None),
        ("$ hocket list presets # all", ["list", "presets"], None),
        ("    hocket plan \\\n        x --json", ["plan", "x", "--json"], None),
    ],
)
def test_commands_are_found_as_they_are_printed(line, arguments, mark, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"Words.\n\n{line}\n\nhocket is a word here.\n")
    assert commands(page) == [(3, arguments, mark)]


def test_a_comment_above_a_block_says_which_commands_are_not_run(tmp_path):
    page = tmp_path / "page.md"
    block = "    hocket show a\n    hocket show b\n\n    hocket show c\n"
    fence = "```\n$ hocket show d\n```\n"
    page.write_text(
        f"<!-- not run: long: 2 -->\n<!-- not run: GPU: 3 -->\n\n{block}\nWords.\n\n{block}\n"
        f"<!-- not run: yours -->\n\n{fence}\n{fence}"
    )
    marks = [command.mark for command in commands(page)]
    assert marks == [None, "long", "GPU", None, None, None, "yours", None]


def test_files_that_pages_name_in_examples_are_there():
    for page in PAGES:
        for name in re.findall(r"examples/[\w./*-]*[\w*]", page.read_text(encoding="utf-8")):
            assert any(ROOT.glob(name)), f"{page.name} names {name}"


def test_benchmarks_and_tests_that_pages_name_are_there():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"(?:benchmarks|tests)/[\w./-]*\.(?:py|md)\b", text):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_what_pages_import_is_there():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for module, names in re.findall(r"^ *from (hocket[\w.]*) import ([\w, ]+)", text, re.M):
            for name in names.split(","):
                found = getattr(importlib.import_module(module), name.strip(), None)
                assert found is not None, f"{page.name} imports {name} from {module}"


def test_commands_in_the_middle_of_a_sentence_exist():
    for page in PAGES:
        for typed in re.findall(r"`(hocket [^`]+)`", page.read_text(encoding="utf-8")):
            words = shlex.split(typed.replace("…", ""))[1:]
            assert unknown_word(words) is None, f"{page.name}: {typed}"


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_index_lists_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - set(re.findall(r"\]\(([^)#\s]+)", index)) == {"README.md"}


def test_files_that_the_walk_names_are_there():
    text = (ROOT / "docs" / "concepts" / "walk.md").read_text(encoding="utf-8")
    for name in re.findall(r"`([a-z_/]+(?:\.py|/))`", text):
        places = [ROOT, ROOT / "src" / "hocket", ROOT / "src" / "hocket" / "plan" / "sections"]
        assert any((place / name).exists() for place in places), f"the walk names {name}"


def test_decisions_have_numbers_of_their_own():
    text = (ROOT / "docs" / "design" / "decisions.md").read_text(encoding="utf-8")
    numbers = re.findall(r"^## (\d{3}) ", text, re.M)
    assert sorted(set(numbers)) == numbers
