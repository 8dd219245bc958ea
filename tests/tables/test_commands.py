"""``hocket tables`` as it is typed."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from hocket.cli import main
from hocket.cli.root import root


@pytest.mark.timeout(400)  # the checker may have to be compiled
def test_check_says_what_held():
    found = CliRunner().invoke(root, ["tables", "check", "--schedules", "500", "--json"])
    assert found.exit_code == 0
    assert json.loads(found.stdout)["faults"] == 0


def test_serve_refuses_what_is_not_there(tmp_path, capsys):
    path = tmp_path / "tables.toml"
    path.write_text('[[table]]\nname = "w"\nrows = 3\nwidth = 2\n')
    deep = tmp_path / "deep.toml"
    deep.write_text("a = " + "[" * 50_000)
    for arguments, code, message in (
        ((str(path), "--shard", "1", "--at", "tcp://*:0"), 2, "there is no shard 1"),
        *(
            ((str(path), "--at", wrong), 2, "is no address")
            for wrong in (
                "somewhere",
                "tcp://",
                "tcp://*:65536",
                "tcp://:1",
                "tcp://*:x",
                "shm://x",
            )
        ),
        ((str(tmp_path / "none.toml"), "--at", "tcp://*:0"), 3, "cannot be read"),
        ((str(deep), "--at", "tcp://*:0"), 3, "is nested too deeply"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["tables", "serve", *arguments])
        assert ended.value.code == code
        assert message in capsys.readouterr().err
