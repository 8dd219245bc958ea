"""Named tokens, cookies and links: who may do what, and what is on disk of them."""

from __future__ import annotations

import json
import os
import stat

import pytest
from service.rest_service import TOKEN, URL, is_problem

from hocket.base.errors import InputFileError, UsageError
from hocket.service.credentials import PAGE_HEADER
from hocket.service.errors import NotFoundError
from hocket.service.tokens import COOKIE_AGE_S, LINK_AGE_S, MAX_COOKIES, Holder, Tokens

pytestmark = pytest.mark.usefixtures("nobody_left")


class Time:
    now_s = 1e9

    def __call__(self):
        return self.now_s


def test_only_hashes_are_on_disk_and_they_outlive_a_restart(tmp_path):
    tokens = Tokens(tmp_path)
    secrets = {
        "ann": tokens.add("ann", role="user"),
        "bob": tokens.add("bob", role="read-only"),
        "cookie": tokens.make_cookie(Holder(name="ann")),
        "local": tokens.local_token,
        "link": tokens.make_link(Holder(name="ann")),
    }
    for path in tmp_path.iterdir():
        assert not any(secret in path.read_text() for secret in secrets.values())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.json"]

    again = Tokens(tmp_path)
    assert again.holder_of(secrets["ann"]) == Holder(name="ann")
    assert again.holder_of(secrets["bob"]) == Holder(name="bob", role="read-only")
    assert again.holder_of_cookie(secrets["cookie"]) == Holder(name="ann")
    # None of them is another kind of secret too.
    assert again.holder_of(secrets["cookie"]) is None
    assert again.holder_of_cookie(secrets["ann"]) is None
    assert again.holder_of(secrets["local"]) is None, "that one ends with its service"
    assert tokens.holder_of(secrets["local"]) == tokens.local
    hashes = json.loads((tmp_path / "tokens.json").read_text())["tokens"]
    assert all(again.holder_of(entry["sha256"]) is None for entry in hashes)


def test_a_name_has_one_token_until_it_is_removed(tmp_path):
    tokens = Tokens(tmp_path, local=Holder(name="me"))
    first = tokens.add("ann", role="user")
    cookie = tokens.make_cookie(Holder(name="ann"))
    link = tokens.make_link(Holder(name="ann"))
    for name in ("ann", "me", "", " ann", "a" * 61, "a\nb"):
        with pytest.raises(UsageError):
            tokens.add(name, role="user")
    tokens.remove("ann")
    with pytest.raises(NotFoundError):
        tokens.remove("ann")
    for found in (tokens, Tokens(tmp_path)):
        assert found.holder_of(first) is None
        assert found.holder_of_cookie(cookie) is None
    assert tokens.use_link(link) is None
    assert tokens.add("ann", role="user") != first


def test_links_work_once_and_not_for_long():
    time = Time()
    tokens = Tokens(now_s=time)
    link, late = (tokens.make_link(Holder(name="ann")) for _ in range(2))
    assert tokens.use_link(link) == Holder(name="ann")
    assert tokens.use_link(link) is None
    assert tokens.use_link("nonsense") is None
    time.now_s += LINK_AGE_S
    assert tokens.use_link(late) is None


def test_cookies_grow_old_and_do_not_pile_up():
    time = Time()
    tokens = Tokens(now_s=time)
    token = tokens.add("ann", role="user")
    old = tokens.make_cookie(Holder(name="ann"))
    cookies = []
    for _ in range(MAX_COOKIES):
        time.now_s += 1.0
        cookies.append(tokens.make_cookie(Holder(name="ann")))
    assert tokens.holder_of_cookie(old) is None
    assert tokens.holder_of_cookie(cookies[0]) is not None
    time.now_s += COOKIE_AGE_S + 2.0
    new = tokens.make_cookie(Holder(name="ann"))
    assert tokens.holder_of_cookie(cookies[-1]) is None
    assert tokens.holder_of_cookie(new) is not None
    tokens.forget_cookie(new)
    assert tokens.holder_of_cookie(new) is None
    assert tokens.holder_of(token) is not None


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"tokens": 3}', '{"tokens": [{"name": "x"}]}', "\xff"]
)
def test_a_file_that_holds_no_tokens_is_refused(tmp_path, text):
    path = tmp_path / "tokens.json"
    path.write_bytes(text.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(InputFileError):
        Tokens(tmp_path)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(InputFileError, match="no plain file"):
        Tokens(tmp_path)


def test_a_token_that_reads_changes_nothing_and_jobs_carry_names(service):
    def token_of(name, **body):
        answer = service.client.post("/v1/tokens", json={"name": name, **body})
        assert answer.status_code == 201
        return answer.json()["token"]

    reader = service.bare(authorization=f"Bearer {token_of('eve', role='read-only')}")
    writer = service.bare(authorization=f"Bearer {token_of('ann')}")
    is_problem(service.client.post("/v1/tokens", json={"name": "ann"}), 422)
    job = {"name": "job", "command": ["true"]}
    number = writer.post("/v1/jobs", json=job).json()["id"]
    assert reader.get(f"/v1/jobs/{number}").json()["owner"] == "ann"
    assert service.submit()["owner"] == "tester"
    for method, path, body in (
        ("POST", "/v1/jobs", job),
        ("DELETE", f"/v1/jobs/{number}", None),
        ("POST", f"/v1/jobs/{number}:pause", None),
        ("POST", f"/jobs/{number}/cancel", None),
        ("POST", "/v1/tokens", {"name": "x"}),
        ("DELETE", "/v1/tokens/ann", None),
        ("POST", "/v1/login-links", None),
    ):
        assert "may look" in is_problem(reader.request(method, path, json=body), 403)["detail"]
    assert reader.post("/v1/simulate", json={}).status_code == 200
    people = reader.get("/v1/tokens").json()["tokens"]
    assert [(one["name"], one["role"]) for one in people if one["name"] != "tester"] == [
        ("ann", "user"), ("eve", "read-only"),
    ]  # fmt: skip

    assert service.client.delete("/v1/tokens/ann").status_code == 204
    is_problem(service.client.delete("/v1/tokens/ann"), 404)
    is_problem(writer.get("/v1/jobs"), 401)
    assert service.client.delete("/v1/tokens/eve").status_code == 204
    assert TOKEN not in reader.get("/v1/tokens").text


def test_a_link_signs_a_browser_in_once(service):
    url = service.client.post("/v1/login-links").json()["url"]
    answer = service.bare().get(url)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].partition(";")[0]
    assert "HttpOnly" in answer.headers["set-cookie"]
    browser = service.bare(cookie=cookie)
    assert browser.get("/").status_code == 200
    again = service.bare().get(url)
    assert again.headers["location"] == "/login?wrong=1"
    assert "set-cookie" not in again.headers

    number = browser.post(
        "/v1/jobs", json={"name": "x", "command": ["true"]}, headers={PAGE_HEADER: "1"}
    ).json()["id"]
    # A form says which page it is of.
    wrong = browser.post(f"/jobs/{number}/pause", headers={"origin": "http://127.0.0.1:1"})
    assert wrong.status_code == 403
    sent = browser.post(f"/jobs/{number}/pause", headers={"origin": URL})
    assert sent.status_code == 303

    left = browser.post("/logout")
    assert left.status_code == 303
    assert "max-age=0" in left.headers["set-cookie"].lower()
    assert browser.get("/v1/jobs").status_code == 401
