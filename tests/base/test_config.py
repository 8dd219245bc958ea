"""What is read from the environment."""

import os

import pytest

from hocket.base import config
from hocket.base.errors import UsageError


def test_import_paths_hold_from_another_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"src{os.pathsep}/opt/lib{os.pathsep}")
    found = config.environment_anywhere()
    # An empty part means the working folder.
    assert found["PYTHONPATH"].split(os.pathsep) == [f"{tmp_path}/src", "/opt/lib", str(tmp_path)]
    assert {**found, "PYTHONPATH": os.environ["PYTHONPATH"]} == dict(os.environ)


def test_an_environment_without_import_paths_stays_as_it_is(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert config.environment_anywhere() == dict(os.environ)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
@pytest.mark.parametrize("text", ["x", "", "-1", "1.5"])
def test_what_a_launcher_says_is_a_number(monkeypatch, name, text):
    monkeypatch.setenv(name, "3")
    assert config.rank_variables()[name] == "3"
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=f"{name}={text!r} is no number"):
        config.rank_variables()
