"""What holds for every option of every command."""

from collections.abc import Iterator

import click

from hocket.cli.root import root


def _commands(command: click.Command, name: str = "hocket") -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command)
    for each in command.list_commands(context):
        found = command.get_command(context, each)
        assert found is not None
        yield from _commands(found, f"{name} {each}")


def test_every_option_is_explained_and_every_command_speaks_json():
    for name, command in _commands(root):
        options = [each for each in command.params if isinstance(each, click.Option)]
        assert any("--json" in each.opts for each in options), name
        for option in options:
            assert option.hidden or option.help, f"{name} {option.opts[0]}"
