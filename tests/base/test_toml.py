"""TOML that would take far more memory than its file."""

from __future__ import annotations

import pytest

from hocket.base.errors import InputFileError
from hocket.base.toml import parse_toml


@pytest.mark.parametrize(
    "text",
    [
        "a" + ".a" * 50_000 + " = 1",
        "[a" + " . b" * 50_000 + "]",
        "x = {a" + '."b"' * 50_000 + " = 1}",
    ],
)
def test_keys_of_many_parts_are_refused_before_they_are_read(text):
    with pytest.raises(InputFileError, match="nested too deeply"):
        parse_toml(text.encode())


def test_dots_in_texts_and_keys_of_some_parts_are_fine():
    text = 'a.b.c = "' + "x." * 500 + '"\n"k.k" = 1.5'
    assert parse_toml(text.encode()) == {"a": {"b": {"c": "x." * 500}}, "k.k": 1.5}
