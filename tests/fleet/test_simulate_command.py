"""``hocket fleet simulate`` as a person uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import hocket.fleet.simulator
from hocket.base.errors import HocketError, UsageError
from hocket.cli.fleet.given import parse_cluster
from hocket.cli.fleet.simulate import command
from hocket.kernels.progress import compiling

TRACE = """name,job_type,arrival_s,gang,duration_s
<b>one</b>,x,0,1,2000
two,x,10,2,3000
three,x,20,8,100
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def run(trace: Path, *arguments: str) -> str:
    result = CliRunner().invoke(command, [str(trace), "--cluster", "a:1x2,b:2", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_json_has_the_promised_keys(trace: Path) -> None:
    figures = json.loads(run(trace, "--json"))
    assert figures["average_jct_s"] == pytest.approx((2000 + 3000) / 2)
    assert figures["makespan_s"] == pytest.approx(3010.0)
    assert figures["num_left_out"] == 1
    assert 0.0 < figures["utilisation"] <= 1.0
    assert figures["cpu_seconds"] > 0.0


def test_a_first_simulation_says_that_it_compiles(trace: Path, monkeypatch) -> None:
    simulate = hocket.fleet.simulator.simulate

    def compiling_first(*args, **kwargs):
        compiling("play")
        return simulate(*args, **kwargs)

    monkeypatch.setattr("hocket.fleet.simulator.simulate", compiling_first)
    result = CliRunner().invoke(command, [str(trace), "--cluster", "a:1x2,b:2", "--json"])
    assert "kernels for this CPU, once" in result.stderr
    assert json.loads(result.stdout)["num_jobs"] == 2


def test_policies_stand_side_by_side(trace: Path) -> None:
    text = run(trace, "--policy", "las", "--policy", "fifo")
    assert "las" in text
    assert "fifo" in text
    assert "1 job left out" in text
    both = json.loads(run(trace, "--policy", "las", "--policy", "fifo", "--json"))
    assert [figures["policy"] for figures in both["runs"]] == ["las", "fifo"]


def test_gavel_is_slower_to_start(trace: Path) -> None:
    single = trace.with_name("single.csv")
    single.write_text(
        "name,job_type,arrival_s,gang,duration_s\n"
        "one,x,0,1,3600\ntwo,x,100,1,3600\nthree,x,200,1,3600\n"
    )
    ours = json.loads(run(single, "--json"))["average_jct_s"]
    gavels = json.loads(run(single, "--json", "--compatible", "gavel"))["average_jct_s"]
    assert gavels > ours


def test_max_min_fairness_of_gangs_cannot_be_compared_with_gavel(trace: Path) -> None:
    with pytest.raises(UsageError, match="with gangs, many allocations have the same lowest job"):
        run(trace, "--policy", "las", "--compatible", "gavel")


@pytest.mark.parametrize("policy", ["finish-time-fairness", "ftf-agnostic", "fifo-agnostic"])
def test_what_cannot_be_compared_with_gavel_is_refused(trace: Path, policy: str) -> None:
    with pytest.raises(UsageError, match="cannot be run as Gavel does"):
        run(trace, "--policy", policy, "--compatible", "gavel")


def test_a_lone_job_is_never_preempted(tmp_path: Path) -> None:
    lone = tmp_path / "lone.csv"
    lone.write_text("name,job_type,arrival_s,gang,duration_s\nlone,x,0,1,36000\n")
    figures = json.loads(run(lone, "--json", "--cluster", "v100:2,p100:1"))
    assert (figures["num_preemptions"], figures["num_starts"]) == (0, 1)


def told(trace: Path, *arguments: str) -> str:
    result = CliRunner().invoke(command, [str(trace), *arguments])
    assert result.exit_code == 0
    return result.stderr


def test_a_gang_that_can_never_fit_is_told(trace: Path) -> None:
    text = run(trace, "--cluster", "a:1x2,b:2")
    assert "1 job left out ('three'): no device type has the devices" in text


def test_what_a_trace_says_and_is_not_followed_is_told(tmp_path: Path) -> None:
    path, table = tmp_path / "shock.trace", tmp_path / "table.json"
    line = "x\tpython3 main.py\tfolder\t--steps\t1\t1000\t1\t{}\t1\t-1.0\t{}\t0\n"
    path.write_text(line.format("static", 100) + line.format("gns", 100) + line.format("gns", 200))
    table.write_text(json.dumps({"v100": {"('x', 1)": {"null": 10.0}}}))
    text = told(path, "--cluster", "v100:2", "--throughputs", str(table))
    assert "2 of 3 jobs change their batch size while they run (gns)" in text
    assert "1 of 3 jobs take other times than the trace says" in text
    path.write_text(line.format("static", 100))
    assert "jobs" not in told(path, "--cluster", "v100:2", "--throughputs", str(table))


def test_the_report_is_one_inert_file(trace: Path, tmp_path: Path) -> None:
    run(trace, "--html", str(tmp_path / "report.html"), "--policy", "las", "--policy", "fifo")
    page = (tmp_path / "report.html").read_text()
    assert "<b>one" not in page
    assert "&lt;b&gt;one" in page
    assert "<script" not in page
    for inert in ("http-equiv", "http://www.w3.org/2000/svg", "http%3A//www.w3.org/2000/svg"):
        page = page.replace(inert, "")
    assert "http" not in page
    assert page.count("<polyline") == 4
    assert page.count("<rect") > 4
    # Jobs by their names, in a table and in the bars that have room; dark where that is wanted; on
    # a telephone tables and pictures move, and the page does not.
    assert 'class="name">&lt;b&gt;one' in page
    assert 'class="on">&lt;b&gt;one' in page
    assert "prefers-color-scheme:dark" in page
    assert "width=device-width" in page
    body = page.partition("<body>")[2]
    assert body.count("<table") + body.count('role="img"') == body.count('<div class="scroll">')


@pytest.mark.parametrize(
    "arguments",
    [
        ["--policy", "lass"],
        ["--jobs", "2:1"],
        ["--jobs", "x"],
        ["--jobs", "0:" + "9" * 5000],
        ["--prices", "c=1"],
        ["--prices", "a=free"],
        ["--space-sharing", "--compatible", "gavel"],
    ],
)
def test_wrong_options_are_refused(trace: Path, arguments: list[str]) -> None:
    with pytest.raises(HocketError):
        run(trace, *arguments)


@pytest.mark.parametrize(
    "text", ["", "a", "a:", "a:0", "a:1,a:2", "a:1x0", "a:-1", "a:1y2", "a:999999999"]
)
def test_wrong_clusters_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_cluster(text)


def test_clusters_are_read() -> None:
    device_types, devices = parse_cluster("v100:2x2, k80:1")
    assert device_types == ("v100", "k80")
    assert [(d.name, d.server) for d in devices] == [
        ("v100-0", "v100/0"),
        ("v100-1", "v100/0"),
        ("v100-2", "v100/1"),
        ("v100-3", "v100/1"),
        ("k80-0", "k80/0"),
    ]
