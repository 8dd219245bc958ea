"""The client's side without a service: addresses, tokens, what is printed, waiting."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from hocket.base.errors import UsageError
from hocket.cli.fleet import connection
from hocket.cli.fleet import explain as explaining
from hocket.service import client as clients
from hocket.service import serve as serving
from hocket.service.pinned_tls import ServerTls


@pytest.mark.parametrize(
    "url",
    ["http://[::1", "http://h:99999", "http://h:x", "ftp://h", "http://u:p@h", "http://h/a b", ""],
)
def test_addresses_that_are_none_are_refused(url, monkeypatch):
    monkeypatch.setenv("HOCKET_FLEET_TOKEN", "x" * 30)
    with pytest.raises(UsageError, match="no address of a service"):
        clients.find_service(Path("nowhere"), url)


@pytest.mark.parametrize("token", ["a\nb", "a b", "\u00e9", "a\x00b"])
def test_a_token_that_no_header_can_hold_is_refused(token, monkeypatch):
    monkeypatch.setattr(clients, "fleet_token", lambda: token)
    with pytest.raises(UsageError, match="HOCKET_FLEET_TOKEN holds no valid token"):
        clients.find_service(Path("nowhere"), "http://127.0.0.1:1")


def test_explanations_read_well(capsys):
    device_type = {
        "device_type": "v100",
        "free": 0,
        "devices": 2,
        "steps_per_s": 1.0,
        "target_share": 0.5,
    }
    evidence = {
        "device_types": [{**device_type, "deficit_rounds": -0.001}],
        "holders": [{"job": 2}],
        "num_holders": 3,
    }
    for status, is_held in (("queued", True), ("running", False)):
        explaining._print({"sentence": "so it is", "evidence": evidence, "status": status})
        out = capsys.readouterr().out
        assert "deficit 0.0 rounds" in out
        assert ("is held by job 2 and 2 more" in out) == is_held


def test_watching_waits_for_a_service_that_is_away(capsys, monkeypatch):
    looks = iter([{"a": 1}, clients.UnreachableError("away"), {"a": 2}, KeyboardInterrupt()])

    def look() -> dict:
        found = next(looks)
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(connection, "WATCH_S", 0.0)
    connection.watch(look, lambda found: f"seen {found['a']}", as_json=False)
    assert capsys.readouterr().out == "seen 1\n\nseen 2\n\n"


@pytest.mark.parametrize(
    ("host", "names", "url"),
    [
        ("127.0.0.1", (), "127.0.0.1"),
        ("10.0.0.7", ("named.example",), "10.0.0.7"),
        ("::1", (), "[::1]"),
        ("0.0.0.0", ("named.example",), "named.example"),
        ("::", ("named.example", "other"), "named.example"),
        ("0.0.0.0", (), "127.0.0.1"),
    ],
)
def test_the_address_of_a_service_is_one_that_others_can_use(tmp_path, host, names, url):
    settings = serving.ServeSettings(folder=tmp_path, host=host, names=names, tls=(host, 0))
    with serving.listening_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert serving._url(settings, listener) == f"http://{url}:{port}"
        secure = serving.SecureListener(listener, ServerTls(ssl.create_default_context(), ""))
        shown = serving._secure_url(settings, secure)
    everywhere = host in ("0.0.0.0", "::") and not names
    assert shown == f"https://{socket.gethostname() if everywhere else url}:{port}"
