from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from rich.cells import cell_len
from rich.text import Text
from view.view_samples import comparison_of, hostile_sample, random_sample, sample

from hocket.base.units import format_percent, format_seconds
from hocket.planners.candidates import Comparison
from hocket.simulate.analysis import COMPUTE
from hocket.view.comparison import comparison_table
from hocket.view.facts import facts_of, memory_by_role
from hocket.view.names import inert, shorten
from hocket.view.story import advice
from hocket.view.table import Column, FittedTable, plain
from hocket.view.text import explanation, plan_summary
from hocket.view.wording import dollars, of_capacity, price_of_steps, sentence

GIB = 2**30


@pytest.mark.parametrize(
    ("used", "capacity", "expected"),
    [
        (int(7.4 * GIB), 8 * GIB, "7.4 of 8.0 GiB"),
        (int(27.1 * GIB), 16 * GIB, "27.1 of 16.0 GiB"),
        (3 * 2**20, 8 * GIB, "3.0 MiB of 8.0 GiB"),
        (0, 8 * GIB, "0.0 of 8.0 GiB"),
        (12, 500, "12 of 500 B"),
        (5, 0, "5 of 0 B"),
        (239 * 2**20, 0, "239.0 MiB of 0 B"),
    ],
)
def test_of_capacity_uses_one_unit_where_it_can(used, capacity, expected):
    assert of_capacity(used, capacity) == expected


def test_numbers_keep_what_is_small_visible():
    assert format_percent(0.001) == "<1 %"
    assert format_percent(0.0) == "0 %"
    assert format_percent(0.714) == "71 %"
    assert dollars(12.239) == "$12.24"
    assert dollars(0.00314) == "$0.0031"
    assert price_of_steps(3.6, 2.0) == "$2.00"
    assert sentence("it fits") == "It fits."
    assert sentence("It fits.") == "It fits."


@pytest.mark.parametrize(
    "text", ["\x1b[31mred", "a\r\nb", "\u202egpj.exe", "\x07", "\x9b31m", "\ud800", "\u2028"]
)
def test_inert_names_print_one_line_of_printable_characters(text):
    shown = inert(text)
    assert shown.isprintable()
    assert shown.encode()


def test_inert_keeps_ordinary_names_and_cuts_endless_ones():
    assert inert("transformer.h.0.attn → é 漢") == "transformer.h.0.attn → é 漢"
    assert len(inert("x" * 10_000)) == 160


def test_shorten_counts_wide_characters():
    assert shorten("漢字漢字", 5) == "漢字…"
    assert shorten("abc", 3) == "abc"
    assert shorten("abcd", 0) == ""


NUMBERS = re.compile(r"[0-9.]+ (?:of|ms|MiB)|\$[0-9.]+")


@pytest.mark.parametrize("width", [50, 60, 80, 120])
def test_comparison_table_fits_the_width_and_keeps_its_numbers_whole(width):
    comparison = comparison_of(sample(12), planner="a planner with a name of many words " * 3)
    lines = plain(comparison_table(comparison), width).splitlines()
    assert all(cell_len(line) <= width for line in lines)
    table = lines[: 1 + len(comparison.candidates)]
    for line, candidate in zip(table[1:], comparison.candidates, strict=True):
        if candidate.step_s is not None:
            assert format_seconds(candidate.step_s) in line
        if candidate.timeline is not None:
            assert "64.0 MiB" in line
    assert table[-1].lstrip().startswith("✔")
    assert [line.rstrip().endswith("✗") or "✗ " in line for line in table] == [
        False, False, True, False, False,
    ]  # fmt: skip


def test_comparison_table_tells_why_and_what_limits():
    text = plain(comparison_table(comparison_of(sample())), 200)
    assert "chosen because its step is 18% shorter" in text
    assert "limited by gpu1" in text


def test_every_candidate_without_a_step_has_its_reason():
    made = comparison_of(sample())
    fits = replace(made.winner, planner="other", feasible=False, reason="a path comes back")
    text = plain(comparison_table(replace(made, candidates=(*made.candidates, fits))), 200)
    assert "other: a path comes back" in text
    lacking = next(c for c in made.candidates if c.timeline is not None and not c.feasible)
    assert f"{lacking.planner}: " not in text  # its line shows ✗


def test_comparison_table_shows_prices_only_when_known():
    priced = plain(comparison_table(comparison_of(sample())), 120)
    free = plain(comparison_table(comparison_of(sample(price=0.0))), 120)
    assert "$ per M samples" in priced
    assert "$" not in free


def test_comparison_table_without_a_winner_has_no_tick():
    made = comparison_of(sample())
    none = Comparison(
        problem=made.problem,
        candidates=made.candidates[:2],
        chosen=None,
        why="gpu0 lacks 1 GiB",
        bound=made.bound,
    )
    text = plain(comparison_table(none))
    assert "✔" not in text
    assert "gpu0 lacks 1 GiB" not in text, "the error that follows says it, once"


def test_fitted_table_drops_whole_columns_by_rank():
    table = FittedTable(
        columns=(
            Column(title="name", is_name=True),
            Column(title="kept", align="right"),
            Column(title="second", align="right", rank=1),
            Column(title="first", align="right", rank=2),
        ),
        rows=[[Text("n" * 24), Text("123456"), Text("222222"), Text("111111")]],
    )
    assert "111111" in plain(table, 60)
    assert "111111" not in plain(table, 45)
    assert "222222" in plain(table, 45)
    assert "222222" not in plain(table, 36)
    for width in (20, 30, 36, 45, 60):
        assert "123456" in plain(table, width)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_plan_summary_and_explanation_fit_the_width(width):
    made = sample(12)
    for view in (plan_summary(*made.parts), explanation(*made.parts)):
        lines = plain(view, width).splitlines()
        assert all(cell_len(line) <= width for line in lines)


def test_plan_summary_tells_devices_links_and_longest_ops():
    made = sample(12)
    text = plain(plan_summary(*made.parts), 120)
    facts = facts_of(*made.parts)
    assert f"step {format_seconds(made.timeline.makespan_s)} · 96 ops · 3 devices" in text
    for device in facts.devices:
        expected = of_capacity(device.peak_bytes, device.capacity_bytes)
        line = next(li for li in text.splitlines() if li.strip().startswith(device.name))
        assert expected in line
        assert format_percent(device.busy_share) in line
    assert facts.links[0].name in text
    assert facts.top_ops[0].name in text


def test_memory_by_role_adds_up_to_the_peak_of_each_device():
    for made in (sample(12), random_sample(60, 3, seed=2)):
        held = memory_by_role(made.problem, made.timeline)
        sums = np.sum([sizes for sizes in held.values()], axis=0)
        assert sums.tolist() == made.timeline.peak_bytes.tolist()


def test_memory_by_role_counts_parameters_on_every_device_that_is_their_home():
    made = sample(12)
    parameters = memory_by_role(made.problem, made.timeline)["parameters"]
    assert sum(parameters) == made.problem.graph.bytes_by_role()["parameter"]


def test_facts_count_bytes_of_every_link():
    made = sample(6)
    facts = facts_of(*made.parts)
    moved = made.problem.costs.tensor_bytes[made.timeline.transfer_tensor]
    assert facts.moved_bytes == moved.sum()
    # Every transfer crosses two links: to the host and from it.
    assert sum(link.moved_bytes for link in facts.links) == 2 * facts.moved_bytes
    assert sum(link.num_transfers for link in facts.links) == 2 * facts.num_transfers
    durations = made.timeline.op_end_s - made.timeline.op_start_s
    assert facts.top_ops[0].duration_s == pytest.approx(durations.max())


def test_explanation_names_the_longest_steps_of_the_path():
    made = sample(12)
    text = plain(explanation(*made.parts), 120)
    facts = facts_of(*made.parts)
    longest = max(facts.path.steps, key=lambda step: step.end_s - step.start_s)
    assert longest.kind == "op"
    assert made.problem.graph.op_names[longest.index] in text
    assert "critical path: " in text
    assert sum(facts.path.shares.values()) == pytest.approx(1.0)
    assert facts.bottleneck in text


@pytest.mark.parametrize(
    ("busy", "is_in_turn"), [((0.45, 0.4), True), ((0.98, 0.01), False), ((0.9, 0.05), False)]
)
def test_devices_of_which_one_never_rests_are_not_said_to_compute_in_turn(busy, is_in_turn):
    facts = facts_of(*sample(12).parts)
    devices = tuple(
        replace(device, num_ops=1, busy_s=share, busy_share=share)
        for device, share in zip(facts.devices[:2], busy, strict=True)
    )
    path = replace(facts.path, shares={COMPUTE: 0.9})
    said = advice(replace(facts, devices=devices, path=path))
    assert any("one after another" in line for line in said) is is_in_turn


def test_advice_points_at_the_full_device():
    made = sample(12)
    capacity = made.problem.memory_bytes.tolist()
    full = replace(made.timeline, peak_bytes=np.array(capacity, dtype=np.int64))
    assert any("memory on gpu0" in line for line in advice(facts_of(made.problem, made.plan, full)))
    assert not any("memory on" in line for line in advice(facts_of(*made.parts)))


def test_text_of_hostile_names_has_no_control_characters():
    made = hostile_sample()
    for view in (plan_summary(*made.parts), explanation(*made.parts)):
        text = plain(view, 120)
        assert all(char.isprintable() or char == "\n" for char in text)
        assert text.encode()
