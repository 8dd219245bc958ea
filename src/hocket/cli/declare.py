"""Declare commands by the signatures of their functions, and groups by the names of modules.

Annotations describe arguments and options:

    @declare("greet")
    def greet(*, name: Annotated[str, argument("NAME")],
              times: Annotated[int, option("How often.", type=click.IntRange(1))] = 1,
              tone: Annotated[Literal["loud", "low"], "Tone of voice."] = "low",
              as_json: bool) -> None: ...

A plain text in an annotation is the help of an option that is named like the parameter. A parameter
without a default is required. ``bool`` makes a flag, and ``tuple[str, ...]`` makes an option that
may be repeated. A parameter whose type is a dataclass adds an option for each field of the
dataclass. Every command takes ``--json``. `LazyGroup` imports a command when it is used.
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
    """Metadata of an annotation: the flags and click settings of one parameter."""

    flags: tuple[str, ...]
    is_argument: bool
    settings: Mapping[str, Any]

    def add_to(self, function: Callable[..., Any], name: str, hint: Any, default: Any) -> Any:
        """Decorate a function with this option or argument, as click's decorators do."""
        # Annotated[...] keeps the annotated type in __origin__.
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
    """Members of a union, a tuple or a ``Literal``; for other types a list of the type itself."""
    members = get_args(hint)
    return [inner for each in members for inner in _members(each)] if members else [hint]


def option(help: str, *flags: str, **settings: Any) -> _Declared:
    """Describe an option; its flag defaults to ``--`` and the parameter's name.

    ``settings`` are passed to click.
    """
    return _Declared(flags, False, {"help": help, **settings})


def argument(metavar: str | None = None, **settings: Any) -> _Declared:
    """Describe a positional argument; ``settings`` are passed to click."""
    return _Declared((), True, {"metavar": metavar, **settings})


def declare(
    name: str, group: click.Group | None = None, **settings: Any
) -> Callable[[Callable[..., None]], click.Command]:
    """Return a decorator that turns a function into a command and adds it to ``group`` if there is
    one.
    """

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
        # Click prepends each parameter to the list, so the last one is added first.
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
    """Yield name, annotation and default of a parameter, or of each field of a dataclass
    parameter."""
    group = _group_of(hint)
    if group is None:
        yield key, hint, parameter.default
        return
    hints = get_type_hints(group, include_extras=True)
    for name, each in signature(group).parameters.items():
        yield from _parts(name, hints[name], each)


def _collected(key: str, hint: Any, given: Mapping[str, Any]) -> Any:
    """Value of a parameter; for a dataclass parameter, an instance made from the values of its
    fields.
    """
    group = _group_of(hint)
    if group is None:
        return given[key]
    hints = get_type_hints(group, include_extras=True)
    # Nested dataclasses have no value of their own in ``given``, but their fields do.
    names = [name for name in hints if name in given or _group_of(hints[name])]
    return group(**{name: _collected(name, hints[name], given) for name in names})


def _group_of(hint: Any) -> Callable[..., Any] | None:
    """The type itself if it is a dataclass, whose fields are options; None for other types."""
    group: Any = hint
    return group if is_dataclass(hint) else None


class LazyGroup(click.Group):
    """Command group that imports a command when it is used.

    ``places`` maps the name of each command to its module, written ``module:attribute`` if the
    command is not named ``command`` there.
    """

    def __init__(self, *args: Any, places: Mapping[str, str], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, in the order of ``places``."""
        return list(self.places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None if the name is unknown."""
        if cmd_name not in self.places:
            return None
        module, _, name = self.places[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name or "command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command of the arguments; for an unknown name, suggest the closest known
        one."""
        # An argument that starts with a dash is an unknown option, for which click has a message.
        if args[0] not in self.places and not args[0].startswith("-"):
            raise unknown_name("command", args[0], self.places)
        return super().resolve_command(ctx, args)
