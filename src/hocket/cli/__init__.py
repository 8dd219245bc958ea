"""The command line: ``hocket COMMAND``, with the exit code of each kind of error.

Modules of commands import only click at the top, so that ``--help`` is instant. Everything else is
imported when a command runs.
"""

from __future__ import annotations

import io
import sys

from hocket.cli.output import fail, wants_json
from hocket.cli.root import root

__all__ = ["main"]


def main(argv: list[str] | None = None) -> None:
    """Run one command; exit with one of the codes that ``hocket --help`` lists."""
    import click

    from hocket.base.errors import HocketError, InterruptedByUserError, UsageError

    arguments = sys.argv[1:] if argv is None else argv
    as_json, stdout = wants_json(arguments), sys.stdout
    _write_what_cannot_be_encoded()
    try:
        # With standalone_mode click would print its own messages and exit with its own codes, and
        # --json would get no error object.
        root.main(args=arguments, prog_name="hocket", standalone_mode=False)
    except HocketError as error:
        sys.exit(fail(error, as_json=as_json))
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # click 8.2 on
            click.echo(error.format_message(), err=True)
            sys.exit(UsageError.exit_code)
        command = error.ctx.command_path if getattr(error, "ctx", None) else "hocket"  # type: ignore[attr-defined]
        usage = UsageError(_lower_first(error.format_message()), hint=f"see {command} --help")
        sys.exit(fail(usage, as_json=as_json))
    except (KeyboardInterrupt, click.Abort):
        sys.exit(fail(InterruptedByUserError("interrupted"), as_json=as_json))
    except SystemExit as done:
        # The reader of a pipe has closed it, as `| head` does. Click and rich exit with 1 then, but
        # for hocket this is success. Click hides the BrokenPipeError: only its replacement of
        # sys.stdout shows it.
        is_unread = sys.stdout is not stdout or isinstance(done.__context__, BrokenPipeError)
        raise SystemExit(0) if is_unread else done from None
    except OSError as error:
        # Commands handle the errors of the files that they open. An OSError that arrives here comes
        # from standard output: a closed terminal, a broken pipe or a full disk.
        sys.stderr.write(f"hocket: cannot write the result: {error.strerror or error}\n")
        sys.exit(1)
    except Exception as error:
        sys.exit(fail(_unexpected(error), as_json=as_json))


def _write_what_cannot_be_encoded() -> None:
    """Print a question mark for characters that the terminal cannot encode, such as ✔."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not _is_utf8(stream):
            stream.reconfigure(errors="replace")


def _is_utf8(stream: io.TextIOWrapper) -> bool:
    return stream.encoding.lower().replace("-", "") == "utf8"


def _unexpected(error: Exception) -> Exception:
    from hocket.base.config import debug
    from hocket.base.errors import HocketError

    # HOCKET_DEBUG=1 shows the traceback that users otherwise do not see.
    if debug():
        raise error
    return HocketError(
        f"unexpected {type(error).__name__}: {error}",
        hint="this is a bug in hocket: run again with HOCKET_DEBUG=1 and report it "
        "with the output of hocket doctor",
    )


def _lower_first(text: str) -> str:
    line = " ".join(text.split())  # Click writes choices on lines of their own
    return line[:1].lower() + line[1:].rstrip(".")
