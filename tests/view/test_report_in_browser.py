"""The report in a real browser: what it shows, how it is used, and that it asks nobody."""

from __future__ import annotations

import json

import pytest
from view.view_samples import HOSTILE, comparison_of, hostile_sample, random_sample, sample

from hocket.view.report import write_report

pytestmark = pytest.mark.web


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    made = sample(12)
    write_report(folder / "plain.html", *made.parts, comparison_of(made))
    write_report(folder / "hostile.html", *hostile_sample().parts)
    write_report(folder / "large.html", *random_sample(9000, 4, seed=1).parts)
    return folder


@pytest.fixture
def visit(browser, reports):
    """Open a report; at the end nothing may have failed and nothing may have been asked for."""
    opened = []

    def open_report(name, *, width=1440, height=1000, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        page = context.new_page()
        page.complaints, page.requests = [], []
        page.on("console", lambda m: page.complaints.append(m.text) if m.type != "log" else None)
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("request", lambda request: page.requests.append(request.url))
        url = (reports / name).as_uri()
        page.goto(url)
        opened.append((page, url))
        return page

    yield open_report
    for page, url in opened:
        assert page.complaints == []
        assert [u for u in page.requests if not u.startswith("data:")] == [url]
        page.context.close()


def wait_until(page, holds):
    """Poll from here: the page's policy forbids the evaluation that playwright's waiting needs."""
    for _ in range(100):
        if holds():
            return
        page.wait_for_timeout(20)
    pytest.fail("the page did not react within two seconds")


def data_of(page):
    return json.loads(page.text_content("#data"))


def view_of(page):
    plot = page.locator("#plot")
    return float(plot.get_attribute("data-from")), float(plot.get_attribute("data-to"))


def hover_mark(page, row_label, wanted=None):
    """Move the pointer to the middle of a mark of a row and return its name."""
    data = data_of(page)
    number = next(i for i, row in enumerate(data["rows"]) if row["label"] == row_label)
    row = data["rows"][number]
    mark = max(range(len(row["length"])), key=lambda i: row["length"][i])
    box = page.locator("#plot").bounding_box()
    from_, to = view_of(page)
    left, right = 190, box["width"] - 1
    middle = row["start"][mark] + row["length"][mark] / 2
    x = box["x"] + left + (middle - from_) / (to - from_) * (right - left)
    # Rows of devices: axis 28, then bar 24, memory 30, gap 14.
    y = box["y"] + 28 + number * (24 + 30 + 14) + 12
    page.mouse.move(x, y)
    return data["ops"]["name"][row["span"][mark]]


def test_report_shows_the_values_of_its_data(visit):
    page = visit("plain.html")
    data = data_of(page)
    made = sample(12)
    assert data["step_s"] == made.timeline.makespan_s
    text = page.inner_text("body")
    for row in data["rows"]:
        if not row["link"]:
            assert row["memory_note"] in text
    assert page.title() == "tiny-gpt on mixed – hocket"
    labels = page.locator("#plot svg text").all_text_contents()
    for row in data["rows"]:
        assert any(label and row["label"].startswith(label.rstrip("…")) for label in labels)
    assert page.is_hidden("#static-timeline")


def test_report_formats_times_as_python_does(visit):
    from hocket.base.units import format_bytes, format_seconds

    page = visit("plain.html")
    for value in (0, 1.5e-9, 3.2e-7, 4.56e-6, 1e-3, 0.0396, 0.5, 1.0, 12.345, 100.0, 1234.0):
        assert page.evaluate(f"hocketPaint.seconds({value!r})") == format_seconds(value)
    for value in (0, 17, 1024, 5 * 2**20, 7.4 * 2**30):
        assert page.evaluate(f"hocketPaint.bytes({value!r})") == format_bytes(value)


def test_report_timeline_is_reached_and_moved_by_keyboard(visit):
    page = visit("plain.html")
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "plot":
            break
    else:
        pytest.fail("Tab never reached the timeline")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    whole = view_of(page)
    page.keyboard.press("+")
    zoomed = view_of(page)
    assert zoomed[1] - zoomed[0] == pytest.approx(0.7 * (whole[1] - whole[0]))
    page.keyboard.press("ArrowRight")
    moved = view_of(page)
    assert moved[0] > zoomed[0]
    page.keyboard.press("ArrowLeft")
    assert view_of(page) == pytest.approx(zoomed)
    page.keyboard.press("-")
    assert view_of(page) == pytest.approx(whole)
    page.keyboard.press("n")
    assert page.is_visible("#tip")
    assert page.inner_text("#tip strong") == data_of(page)["path"][0]["name"]
    page.keyboard.press("0")
    assert view_of(page) == pytest.approx(whole)
    page.keyboard.press("c")
    assert page.get_attribute("#focus-path", "aria-pressed") == "true"


def test_report_buttons_and_path_list_change_the_view(visit):
    page = visit("plain.html")
    whole = view_of(page)
    page.click("#zoom-in")
    assert view_of(page)[1] < whole[1]
    assert "to" in page.inner_text("#view-status")
    page.click("#zoom-all")
    assert view_of(page) == whole
    button = page.locator("button[data-step]").first
    step = data_of(page)["path"][int(button.get_attribute("data-step"))]
    assert button.inner_text() == step["name"]
    button.click()
    from_, to = view_of(page)
    assert from_ <= step["start"]
    assert to >= step["start"] + step["length"]
    assert to - from_ < whole[1]
    assert step["name"] in page.inner_text("#tip")


def test_report_tip_tells_the_op_under_the_pointer(visit):
    page = visit("plain.html")
    name = hover_mark(page, "gpu1")
    assert page.inner_text("#tip strong") == name
    text = page.inner_text("#tip")
    assert "aten.mm" in text
    assert "transformer.h." in text
    assert "ms" in text
    page.mouse.move(5, 5)
    assert page.is_hidden("#tip")


def test_report_drag_and_wheel_zoom(visit):
    page = visit("plain.html")
    whole = view_of(page)
    box = page.locator("#plot").bounding_box()
    y = box["y"] + 40
    page.mouse.move(box["x"] + 400, y)
    page.mouse.down()
    page.mouse.move(box["x"] + 700, y, steps=4)
    assert page.is_visible("#brush")
    page.mouse.up()
    dragged = view_of(page)
    share = 300 / (box["width"] - 1 - 190)
    assert dragged[1] - dragged[0] == pytest.approx(share * whole[1], rel=0.02)
    page.mouse.wheel(0, -300)
    wait_until(page, lambda: view_of(page)[0] > dragged[0])
    page.dblclick("#plot", position={"x": 500, "y": 40})
    assert view_of(page) == whole


def test_report_leaves_the_wheel_to_the_page_until_the_timeline_has_focus(visit):
    page = visit("plain.html", height=500)
    page.locator("#plot").scroll_into_view_if_needed()
    whole = view_of(page)
    box = page.locator("#plot").bounding_box()
    page.mouse.move(box["x"] + 400, max(box["y"], 0) + 40)
    before = page.evaluate("scrollY")
    page.mouse.wheel(0, 200)
    wait_until(page, lambda: page.evaluate("scrollY") != before)
    assert view_of(page) == whole


@pytest.mark.parametrize("width", [360, 768, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["plain.html", "hostile.html"])
def test_report_needs_no_sideways_scrolling_of_the_page(visit, width, scheme, name):
    page = visit(name, width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    lightness = page.evaluate(
        "getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (sum(lightness) < 200) == (scheme == "dark")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_text_has_enough_contrast(visit, scheme):
    page = visit("plain.html", color_scheme=scheme)
    ratios = page.evaluate(
        """() => {
        const style = getComputedStyle(document.documentElement);
        const light = (name) => {
          const hex = style.getPropertyValue(name).trim();
          const parts = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
            .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
          return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
        };
        const ratio = (a, b) => {
          const [x, y] = [light(a), light(b)].sort((m, n) => m - n);
          return (y + 0.05) / (x + 0.05);
        };
        const names = ['ink', 'muted', 'accent', 'critical', 'forward', 'backward', 'optimizer'];
        return Object.fromEntries(names.map((name) => [name, ratio(`--${name}`, '--paper')]));
        }"""
    )
    # Labels stand on the coloured marks in the colour of the paper, so the colours count too;
    # 4.5 for text, 4.2 for these labels, whose text the tip repeats.
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.2} == {}
    assert min(ratios["ink"], ratios["muted"], ratios["accent"], ratios["critical"]) >= 4.5


def test_report_shows_hostile_names_as_text(visit):
    page = visit("hostile.html")
    assert page.title() != "owned"
    assert page.locator("img").count() == 0
    text = page.inner_text("body")
    assert HOSTILE[0] in text
    assert HOSTILE[1] in text
    assert "\\x1b[31mred" in text
    name = hover_mark(page, data_of(page)["rows"][0]["label"])
    assert page.inner_text("#tip strong") == name
    assert page.title() != "owned"


def test_report_draws_many_marks_on_a_canvas(visit):
    page = visit("large.html")
    data = data_of(page)
    assert sum(len(row["start"]) for row in data["rows"]) > 20_000
    assert page.locator("#plot canvas").count() == 1
    assert page.locator("#plot svg").count() == 0
    painted = """() => {
      const canvas = document.querySelector('#plot canvas');
      const { data } = canvas.getContext('2d').getImageData(0, 28, canvas.width, 24);
      const colours = new Set();
      for (let i = 0; i < data.length; i += 4) colours.add(data.slice(i, i + 3).join());
      return colours.size;
    }"""
    assert page.evaluate(painted) > 20
    whole = page.locator("#plot canvas").screenshot()
    page.focus("#plot")
    started = page.evaluate("performance.now()")
    for _ in range(10):
        page.keyboard.press("+")
    assert page.evaluate("performance.now()") - started < 5000
    from_, to = view_of(page)
    assert to - from_ < 0.05 * data["end"]
    assert page.locator("#plot canvas").screenshot() != whole


def test_report_is_readable_without_scripts(visit):
    page = visit("plain.html", java_script_enabled=False)
    assert page.is_visible("#static-timeline svg")
    assert page.is_hidden("#live")
    text = page.inner_text("body")
    assert "Critical path" in text
    assert "47.0 of 64.0 MiB" in text
