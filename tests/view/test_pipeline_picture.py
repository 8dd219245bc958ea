import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from simulate.pipelines import CASES, even_costs

from hocket.planners.parallel.schedules import make_schedule
from hocket.simulate.pipeline import simulate_pipeline
from hocket.view.parallel_report import pipeline_svg

SVG = "{http://www.w3.org/2000/svg}"


def _timeline(name="1f1b", num_devices=4, count=8, chunks=None, after_s=0.0):
    schedule = make_schedule(name, num_devices, count, chunks)
    costs = even_costs(num_devices, schedule.num_stages // num_devices)
    costs = replace(costs, after_s=(after_s,) * num_devices)
    return schedule, simulate_pipeline(schedule, costs)


@pytest.mark.parametrize(("name", "chunks"), CASES, ids=[f"{n}-{c}" for n, c in CASES])
def test_picture_is_one_svg_with_every_device_and_kind_of_work(name, chunks):
    timeline = _timeline(name, chunks=chunks)
    root = ElementTree.fromstring(pipeline_svg(*timeline, width=2400))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert [f"device {index}" in texts for index in range(4)] == [True] * 4
    classes = {element.get("class") for element in root.iter(f"{SVG}path")}
    has_weights = timeline[0].splits_backward
    assert {"forward", "backward"} <= classes
    assert ("optimizer" in classes) == has_weights
    assert ("gradient of weights" in texts) == has_weights


def test_every_mark_that_is_wide_enough_has_its_number():
    root = ElementTree.fromstring(pipeline_svg(*_timeline(), width=2400))
    numbers = [e.text for e in root.iter(f"{SVG}text") if e.get("text-anchor") == "middle"]
    assert sorted(numbers) == sorted(str(index) for index in range(8) for _ in range(4 * 2))
    narrow = ElementTree.fromstring(pipeline_svg(*_timeline(count=64), width=300))
    assert not [e for e in narrow.iter(f"{SVG}text") if e.get("text-anchor") == "middle"]


def test_marks_cover_the_busy_time():
    timeline = _timeline()
    root = ElementTree.fromstring(pipeline_svg(*timeline, width=1000))
    paths = [e.get("d") for e in root.iter(f"{SVG}path") if e.get("class") == "forward"]
    assert sum(path.count("M") for path in paths) == 4 * 8


def test_large_pictures_stay_small():
    large = pipeline_svg(*_timeline("interleaved", 16, 512, 4))
    assert len(large) < 500_000
    ElementTree.fromstring(large)
