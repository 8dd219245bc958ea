"""Numbers that users see; after a change on purpose run `python tests/blackbox/regenerate.py`."""

from __future__ import annotations

import pytest
from blackbox.cases import AREAS, changes, golden, write_inputs

CASES = [(area, name) for area, cases in AREAS.items() for name in cases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("golden")
    write_inputs(path)
    return path


@pytest.mark.parametrize(("area", "name"), CASES, ids=lambda each: each.replace(" ", "-"))
def test_numbers_are_those_of_the_golden_file(folder, area, name):
    case = AREAS[area][name]
    if case.needs is not None and not case.needs.exists():
        pytest.skip(f"{case.needs.name} is not here")
    found = changes(golden(area).get(name, {}), case.answer(folder))
    assert not found, "\n".join([*found, "meant? run python tests/blackbox/regenerate.py"])


@pytest.mark.parametrize("area", AREAS)
def test_golden_files_have_the_cases_and_no_others(area):
    assert golden(area).keys() == AREAS[area].keys()
