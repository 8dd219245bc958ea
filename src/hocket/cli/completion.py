"""``hocket completion``: the script that makes a shell complete hocket's commands."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from hocket.cli.output import emit, json_option


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@json_option
@click.pass_context
def command(ctx: click.Context, shell: str, as_json: bool) -> None:
    """Print a completion script; for bash: eval "$(hocket completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(ctx.find_root().command, {}, "hocket", "_HOCKET_COMPLETE").source()
    if as_json:
        emit({"shell": shell, "script": script})
    else:
        click.echo(script)
