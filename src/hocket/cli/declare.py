"""Declare commands by the signatures of their functions, and groups by names of modules.

Annotations describe arguments and options:

    @declare("greet")
    def greet(*, name: Annotated[str, argument("NAME")],
              times: Annotated[int, option("How often.", type=click.IntRange(1))] = 1,
              tone: Annotated[Literal["loud", "low"], "Tone of voice."] = "low",
              as_json: bool) -> None: ...

A text is the help of an option, whose name is that of the parameter. A parameter without default is
required, ``bool`` is a flag and ``tuple[str, ...]`` may be given several times. A parameter whose
type is a dataclass collects the options that its fields declare. Every command takes ``--json``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click

from hocket.base.errors import unknown_name

FILE = click.Path(path_type=Path)
FOLDER = click.Path(path_type=Path, file_okay=False)
_TYPES: dict[Any, Any] = {Path: FILE, int: int, float: float, str: str}
_MISSING = Parameter.empty


@dataclass(frozen=True)
class _Declared:
    """Metadata of an annotation: how one parameter is given on the command line."""

    flags: tuple[str, ...]
    is_argument: bool
    settings: Mapping[str, Any]

    def add_to(self, function: Callable[..., Any], name: str, hint: Any, default: Any) -> Any:
        """The function with this option or argument, as click's decorators add it."""
        kinds = _members(hint.__origin__)
        settings = dict(self.settings)
        choices = [kind for kind in kinds if isinstance(kind, str)]
        if choices:
            settings["type"] = click.Choice(choices)
        for kind in kinds:
            if kind in _TYPES:
                settings.setdefault("type", _TYPES[kind])
        if default is not _MISSING:
            settings["default"] = default
        if self.is_argument:
            return click.argument(name, **settings)(function)
        flags = self.flags or (f"--{name.replace('_', '-')}",)
        if bool in kinds:
            settings["is_flag"] = True
        if ... in kinds:
            settings["multiple"] = True
        required = default is _MISSING
        return click.option(*flags, name, required=required, **settings)(function)


def _members(hint: Any) -> list[Any]:
    """Members of a union, of a tuple and of ``Literal``, or the type itself."""
    members = get_args(hint)
    return [inner for each in members for inner in _members(each)] if members else [hint]


def option(help: str, *flags: str, **settings: Any) -> _Declared:
    """An option, by default ``--`` and the parameter's name; ``settings`` are those of click."""
    return _Declared(flags, False, {"help": help, **settings})


def argument(metavar: str | None = None, **settings: Any) -> _Declared:
    """A positional argument."""
    return _Declared((), True, {"metavar": metavar, **settings})


def declare(
    name: str, group: click.Group | None = None, **settings: Any
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function, part of a ``group`` where one is given."""

    def made_of(function: Callable[..., None]) -> click.Command:
        hints = get_type_hints(function, include_extras=True)
        parameters = signature(function).parameters

        @functools.wraps(function)
        def run(**given: Any) -> None:
            function(**{key: _collected(key, hints[key], given) for key in parameters})

        made: Any = click.option(
            "--json", "as_json", is_flag=True, help="Print the result as one JSON object on stdout."
        )(run)
        found = [part for key, each in parameters.items() for part in _parts(key, hints[key], each)]
        for key, hint, default in reversed(found):
            for said in getattr(hint, "__metadata__", ()):
                declared = option(said) if isinstance(said, str) else said
                made = declared.add_to(made, key, hint, default)
        decorate: Any = click.command(name, **settings)
        command: click.Command = decorate(made)
        if group is not None:
            group.add_command(command)
        return command

    return made_of


def _parts(key: str, hint: Any, parameter: Parameter) -> Iterator[tuple[str, Any, Any]]:
    """Name, annotation and default of a parameter, or of the fields of a dataclass."""
    group = _group_of(hint)
    if group is None:
        yield key, hint, parameter.default
        return
    hints = get_type_hints(group, include_extras=True)
    for name, each in signature(group).parameters.items():
        yield from _parts(name, hints[name], each)


def _collected(key: str, hint: Any, given: Mapping[str, Any]) -> Any:
    """The value of a parameter; of a dataclass, one of the values of its fields."""
    group = _group_of(hint)
    if group is None:
        return given[key]
    hints = get_type_hints(group, include_extras=True)
    names = [name for name in hints if name in given or _group_of(hints[name])]
    return group(**{name: _collected(name, hints[name], given) for name in names})


def _group_of(hint: Any) -> Callable[..., Any] | None:
    """The dataclass whose fields are options; None for other types."""
    group: Any = hint
    return group if is_dataclass(hint) else None


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used.

    ``places`` names the module of each command, ``module:attribute`` where it is not ``command``.
    """

    def __init__(self, *args: Any, places: Mapping[str, str], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands."""
        return list(self.places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if there is none of this name."""
        if cmd_name not in self.places:
            return None
        module, _, name = self.places[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name or "command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of the arguments; refuse an unknown name with the closest one."""
        if args[0] not in self.places and not args[0].startswith("-"):
            raise unknown_name("command", args[0], self.places)
        return super().resolve_command(ctx, args)
