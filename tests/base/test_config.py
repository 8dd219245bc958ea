"""What is read from the environment."""

import os
from pathlib import Path

import pytest

from hocket.base import config
from hocket.base.errors import UsageError
from hocket.transformer.hf_cache import cached_config, cached_names


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


def test_a_user_without_a_home_is_told_which_variable_to_set(monkeypatch):
    for name in ("XDG_STATE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cached_names() == []
    with pytest.raises(UsageError) as caught:
        cached_config("hf:org/name")
    assert "HF_HOME" in str(caught.value.hint)
    with pytest.raises(UsageError) as caught:
        config.fleet_folder()
    assert "--state" in str(caught.value.hint)
