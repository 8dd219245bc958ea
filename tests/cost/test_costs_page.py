"""The page of this room states the numbers that the code uses."""

import re
from pathlib import Path

from hocket.cost.efficiency import DEFAULT_EFFICIENCY, Efficiency

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "costs.md"


def test_costs_page_states_the_default_efficiencies():
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|", PAGE.read_text(), re.MULTILINE)
    stated = {family: Efficiency(float(compute), float(memory)) for family, compute, memory in rows}
    assert stated == dict(DEFAULT_EFFICIENCY)
