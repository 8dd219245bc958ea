"""Names that want to steer the page, and what a page may ask of a browser."""

from __future__ import annotations

import re

import pytest
from service.page_fleets import (
    HOSTILE,
    Elements,
    attempt_of,
    fleet,
    job_with,
    lately_of,
    record_of,
    whole_page,
)

from hocket.service.page.rendering import live_page
from hocket.service.page.router import MAX_LOG_LINES, last_lines
from hocket.service.page.templating import render, static_files
from hocket.service.page.what_if import answer_of, what_if_form


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_add_no_element_and_steer_nothing(name):
    def shape(text: str) -> list[tuple[str, list[str]]]:
        state = fleet((text, "plain", text), num_devices=1)
        state = state.but(
            device_names=(text,), device_types=(text,), teams=(text,), notes={"note": text}
        )
        attempts = [attempt_of(state, 1, 1e9 - 20, outcome=text)]
        ended = (record_of(9, text, message=text),)
        html = whole_page(state, lately=lately_of(*attempts, ended=ended, name=text))
        html += render("fragment.html", page=live_page(state, trouble=text))
        answer = answer_of(state, {"policy": text, f"devices-{text}": text})
        form = what_if_form(state, {"policy": text, f"devices-{text}": text}, answer)
        html += render("what_if.html", form=form)
        html += render("job.html", page=job_with(text))
        html += render("error.html", message=text, hint=text)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u200e\u200f\u202a-\u202e\u2066-\u2069]", html)
        found = Elements(html)
        assert len(html) < 100_000
        for _, attributes in found.tags:
            assert not any(key.startswith("on") or key == "style" for key in attributes)
            for key in ("href", "src", "action"):
                assert (attributes.get(key) or "/").startswith(("/", "#"))
        return [(tag, sorted(attributes)) for tag, attributes in found.tags]

    assert shape(name) == shape("harmless")


def test_hostile_names_are_still_read():
    html = whole_page(fleet(("<b>bold</b>",)))
    assert "<b>bold" not in html
    assert "<b>bold</b>" in Elements(html).texts


def test_pages_need_nothing_from_outside_and_no_inline_code():
    for html in (whole_page(fleet()), render("login.html", is_wrong=True)):
        found = Elements(html)
        assert "style" not in {tag for tag, _ in found.tags}
        for tag, attributes in found.tags:
            assert tag != "script" or attributes["src"].startswith("/static/page.js?")
    for content, _ in static_files().values():
        text = content.decode()
        assert "url(" not in text
        assert "innerHTML" not in text
        urls = set(re.findall(r"https?://[^\"' ]+", text))
        assert urls <= {"http://www.w3.org/2000/svg"}


def test_every_field_and_table_is_labelled():
    found = Elements(whole_page(fleet(), expected=None))
    labelled = {attributes["for"] for tag, attributes in found.tags if tag == "label"}
    fields = {attributes["id"] for tag, attributes in found.tags if tag in ("select", "input")}
    assert fields <= labelled
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all("scope" in attributes for tag, attributes in found.tags if tag == "th")


def test_output_is_cut_and_inert():
    assert last_lines(b"a\nb\r\nc\td\n") == "a\nb\nc       d"
    assert last_lines(b"10%\r20%\r30%\n\xff\x1b[1m") == "30%\n\ufffd\\x1b[1m"
    many = last_lines(b"".join(b"%d\n" % at for at in range(10_000)))
    assert many.split("\n") == [str(at) for at in range(10_000 - MAX_LOG_LINES, 10_000)]
    assert len(last_lines(b"x" * 10**6)) <= 2000
