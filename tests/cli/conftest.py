"""What tests of commands share."""

import pytest
from cli.terminal import exit_code


@pytest.fixture
def hocket(capsys, monkeypatch):
    """Run a command; its exit code, standard output and error output."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments, expect=0):
        code = exit_code([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert code == expect, f"{code}\n{out}\n{err}"
        assert "Traceback" not in err
        assert "unexpected" not in err
        return out, err

    return run
