"""The file that tells clients the address of the service of a state folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.base.errors import InputFileError, UsageError
from hocket.service.endpoint import NAME, read_endpoint, write_endpoint


def test_the_address_of_the_last_start_is_read_back(tmp_path: Path) -> None:
    write_endpoint(tmp_path, "http://127.0.0.1:1")
    write_endpoint(tmp_path, "http://127.0.0.1:2")
    assert read_endpoint(tmp_path) == "http://127.0.0.1:2"


def test_a_folder_that_never_served_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no fleet was ever served from"):
        read_endpoint(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[]", '{"url": 7}'])
def test_a_file_without_an_address_is_refused_with_a_hint(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(InputFileError, match="the file holds no address of a service") as found:
        read_endpoint(tmp_path)
    assert "start the service again" in str(found.value.hint)
    assert str(tmp_path / NAME) in str(found.value.where)
