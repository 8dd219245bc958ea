from __future__ import annotations

import base64
import hashlib
import json
import re
import time
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest
from view.view_samples import (
    HOSTILE,
    Sample,
    comparison_of,
    hostile_sample,
    layered_graph,
    listed_timeline,
    problem_of,
    random_sample,
    sample,
    small_cluster,
)

from hocket.base.units import format_percent, format_seconds
from hocket.graph import Graph, OpColumns, TensorColumns, assemble
from hocket.plan.plan import Plan
from hocket.plan.sections import Placement
from hocket.simulate.timeline import Timeline
from hocket.view.drawing import tick_step
from hocket.view.facts import facts_of
from hocket.view.picture import timeline_svg
from hocket.view.report import plan_html, report_html, write_report
from hocket.view.wording import of_capacity

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.S)


def data_of(html: str) -> dict:
    return json.loads(DATA.search(html)[1])


class Outline(HTMLParser):
    """Tags with their attributes, and all text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


def test_report_is_one_file_without_outside_references():
    outline = Outline(report_html(*sample().parts))
    for tag, attributes in outline.tags:
        for name in ("src", "href", "action", "data"):
            target = attributes.get(name) or ""
            assert not target or target.startswith(("data:", "#")), (tag, target)
    assert [tag for tag, _ in outline.tags].count("h1") == 1


def test_report_policy_allows_exactly_its_own_style_and_script():
    html = report_html(*sample().parts)
    policy = next(
        attributes["content"]
        for tag, attributes in Outline(html).tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.S)
        assert len(bodies) == 1
        digest = base64.b64encode(hashlib.sha256(bodies[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"<[^>]+ (style|on\w+)=", html)


def test_report_is_the_same_byte_for_byte_and_written_atomically(tmp_path):
    made = sample()
    path = tmp_path / "report.html"
    write_report(path, *made.parts, comparison_of(made))
    assert path.read_text() == report_html(*made.parts, comparison_of(made))
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_report_tells_the_numbers_without_scripts():
    made = sample(12)
    comparison = comparison_of(made)
    text = " ".join(Outline(report_html(*made.parts, comparison)).words)
    facts = facts_of(*made.parts)
    assert format_seconds(made.timeline.makespan_s) in text
    for device in facts.devices:
        assert of_capacity(device.peak_bytes, device.capacity_bytes) in text
        assert format_percent(device.busy_share) in text
    for candidate in comparison.candidates:
        assert candidate.planner in text
        assert candidate.reason in text
    assert facts.links[0].name in text
    assert facts.top_ops[0].name in text
    assert "Critical path" in text


def test_report_data_holds_every_span_of_a_small_timeline():
    made = random_sample(300, 3, seed=4)
    data = data_of(report_html(*made.parts))
    timeline = made.timeline
    tick_s = data["tick_s"]
    assert data["end"] * tick_s == pytest.approx(timeline.makespan_s, abs=tick_s)
    seen = {}
    for row in data["rows"]:
        if row["link"]:
            continue
        for start, length, index in zip(row["start"], row["length"], row["span"], strict=True):
            seen[data["ops"]["name"][index]] = (row["index"], start, start + length)
    for op, name in enumerate(made.problem.graph.op_names):
        device, start, end = seen[name]
        assert device == timeline.op_device[op]
        assert start * tick_s == pytest.approx(timeline.op_start_s[op], abs=tick_s)
        assert end * tick_s == pytest.approx(timeline.op_end_s[op], abs=tick_s)
    for device, content in enumerate(data["devices"]):
        assert content["peak_bytes"] == timeline.peak_bytes[device]
        assert max(content["memory"]["held"]) == timeline.memory_curve(device)[1].max()


def test_report_marks_the_critical_path_where_it_runs():
    made = sample(12)
    data = data_of(report_html(*made.parts))
    facts = facts_of(*made.parts)
    ops = [step for step in facts.path.steps if step.kind == "op"]
    marked = sum(len(row["critical"]["start"]) for row in data["rows"] if not row["link"])
    assert marked == len(ops)
    assert len(data["path"]) == len(facts.path.steps)


def test_report_escapes_hostile_names_everywhere():
    html = report_html(*hostile_sample().parts, comparison_of(hostile_sample()))
    tags = [tag for tag, _ in Outline(html).tags]
    assert "img" not in tags
    assert tags.count("script") == 2
    assert "\x1b" not in html
    assert "{{title}}" in html
    html.encode()
    names = data_of(html)["ops"]["name"]
    assert any(name.startswith(HOSTILE[0]) for name in names)


def test_report_of_a_step_without_ops_or_time_is_still_a_page():
    made = random_sample(3, 2, seed=0)
    graph = made.problem.graph
    zero = np.zeros(graph.num_ops)
    nothing = Timeline(
        makespan_s=0.0, op_device=made.timeline.op_device, op_stream=graph.op_stream,
        op_start_s=zero, op_end_s=zero,
        transfer_tensor=np.empty(0, np.int32), transfer_src=np.empty(0, np.int32),
        transfer_dst=np.empty(0, np.int32), transfer_ready_s=np.empty(0),
        transfer_start_s=np.empty(0), transfer_end_s=np.empty(0),
        memory_ptr=np.array([0, 1, 2]), memory_time_s=np.zeros(2),
        memory_bytes=np.zeros(2, np.int64), peak_bytes=np.zeros(2, np.int64),
    )  # fmt: skip
    plan = made.plan.having(Placement(made.timeline.op_device))
    html = report_html(made.problem, plan, nothing)
    assert "0 s" in html
    ET.fromstring(timeline_svg(made.problem, plan, nothing))


def huge(num_ops: int, num_devices: int) -> Sample:
    """As many chains as devices; each moves on to the next device after every eighth op."""
    names = [f"transformer.h.{i // 40}.block.{i % 40}.aten.mm.{i}" for i in range(num_ops)]
    kinds = [f"aten.kind{i % 40}" for i in range(num_ops)]
    op = np.arange(num_ops)
    graph: Graph = assemble(
        "huge",
        OpColumns(name=names, kind=kinds, flops=np.full(num_ops, 1e7)),
        TensorColumns(
            name=[f"t{i}" for i in range(num_ops)], bytes=np.full(num_ops, 2**16), producer=op
        ),
        np.maximum(np.arange(num_ops + 1) - num_devices, 0),
        np.arange(num_ops - num_devices),
    )
    problem = problem_of(graph, small_cluster(num_devices))
    turn = op // num_devices
    device_of = ((op + turn // 8) % num_devices).astype(np.int32)
    start = turn * 1.3e-6
    end = start + 1e-6
    reader = np.arange(num_devices, num_ops)
    moved = reader[device_of[reader - num_devices] != device_of[reader]] - num_devices
    curve = np.arange(num_ops // num_devices)
    timeline = Timeline(
        makespan_s=end.max(), op_device=device_of, op_stream=graph.op_stream, op_start_s=start,
        op_end_s=end,
        transfer_tensor=moved.astype(np.int32), transfer_src=device_of[moved],
        transfer_dst=device_of[moved + num_devices], transfer_ready_s=end[moved],
        transfer_start_s=end[moved], transfer_end_s=start[moved + num_devices],
        memory_ptr=np.arange(num_devices + 1) * len(curve),
        memory_time_s=np.tile(curve * 1.3e-6, num_devices),
        memory_bytes=np.tile(curve % 977 * 2**10, num_devices),
        peak_bytes=np.full(num_devices, 976 * 2**10),
    )  # fmt: skip
    return Sample(problem, Plan(planner="dealt").placing(device_of), timeline)


def test_report_of_3000_ops_is_below_2_megabytes():
    made = huge(3000, 4)
    assert len(report_html(*made.parts).encode()) < 2e6


@pytest.mark.slow
def test_report_of_200000_ops_is_thinned_small_and_quick():
    made = huge(200_000, 16)
    started = time.process_time()
    html = report_html(*made.parts)
    assert time.process_time() - started < 20
    assert len(html.encode()) < 25e6
    data = data_of(html)
    assert data["is_thinned"]
    assert sum(len(row["start"]) for row in data["rows"]) <= 100_000
    assert sum(sum(row["count"]) for row in data["rows"] if not row["link"]) == 200_000


def test_picture_is_xml_with_a_row_per_device_and_link():
    made = sample(6)
    root = ET.fromstring(timeline_svg(*made.parts, width=700))
    assert root.get("width") == "700"
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    for name in made.problem.cluster.device_names:
        assert name in texts
    assert "pcie0 host0→gpu0" in texts
    assert "prefers-color-scheme: dark" in "".join(root.itertext())


def test_picture_stays_inside_its_width():
    made = random_sample(200, 3, seed=9)
    svg = timeline_svg(*made.parts, width=640)
    for x, wide in re.findall(r"M([0-9.]+) [0-9.]+h([0-9.]+)v", svg):
        assert float(x) + float(wide) <= 640
    for x in re.findall(r'<text x="([0-9.]+)"', svg):
        assert float(x) <= 640


def test_picture_has_a_size_by_pixels_and_not_by_ops():
    num_rows, bytes_per_pixel = 4 + 8, 50
    for num_ops in (20_000, 80_000):
        picture = timeline_svg(*huge(num_ops, 4).parts, width=800)
        assert len(picture) < 800 * num_rows * bytes_per_pixel


def test_picture_of_hostile_names_is_xml():
    picture = ET.fromstring(timeline_svg(*hostile_sample().parts))
    assert picture.tag.endswith("svg")
    assert not list(picture.iter("img"))


@pytest.mark.parametrize(
    ("length", "num_ticks", "expected"), [(1.0, 5, 0.2), (0.039, 8, 0.005), (7.0, 7, 1.0)]
)
def test_tick_step_is_a_round_number(length, num_ticks, expected):
    assert tick_step(length, num_ticks) == pytest.approx(expected)


def test_notebook_fragment_is_escaped_and_complete():
    html = plan_html(*hostile_sample().parts)
    tags = [tag for tag, _ in Outline(html).tags]
    assert not {"img", "script"} & set(tags)
    assert "svg" in tags
    made = sample()
    text = " ".join(Outline(plan_html(*made.parts)).words)
    assert format_seconds(made.timeline.makespan_s) in text
    assert "gpu2" in text


def test_report_names_a_graph_that_planners_see(tmp_path):
    graph = layered_graph(2, name="named")
    problem = problem_of(graph, small_cluster(2))
    plan = Plan(planner="p").placing(np.zeros(graph.num_ops, np.int32))
    html = report_html(problem, plan, listed_timeline(problem, plan))
    assert "<h1>named on mixed</h1>" in html
    assert "Nothing is sent between devices." in html
