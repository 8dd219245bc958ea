"""Plan files of earlier versions are still read, and written again as today's."""

import json
from pathlib import Path

import pytest

from hocket.base.errors import InputFileError
from hocket.plan.divided import DividedTraining
from hocket.plan.files import plan_from_data, plan_to_data, read_plan, section_names
from hocket.plan.sections import Communication
from hocket.simulate.engine import simulate
from hocket.simulate.verify import violations

OLDER = Path(__file__).parent / "older"
NAMES = ("placement-1", "parallel-1", "communication-1")


@pytest.mark.parametrize("name", NAMES)
def test_older_file_is_a_legal_plan_and_becomes_one_of_today(name):
    saved = read_plan(OLDER / f"{name}.json")
    assert violations(saved.plan, saved.problem) == []
    written = json.loads(json.dumps(plan_to_data(saved.problem, saved.plan)))
    assert written["schema"] == "hocket.plan/2"
    again = plan_from_data(written, "again")
    assert json.loads(json.dumps(plan_to_data(again.problem, again.plan))) == written


@pytest.mark.parametrize("name", NAMES[:2])
def test_older_file_simulates_to_what_it_predicted(name):
    content = json.loads((OLDER / f"{name}.json").read_text())
    saved = read_plan(OLDER / f"{name}.json")
    assert simulate(saved.problem, saved.plan).makespan_s == content["predicted"]["step_s"]
    assert saved.plan.claims.step_s == content["predicted"]["step_s"]


def test_older_division_keeps_program_and_numbers():
    saved = read_plan(OLDER / "parallel-1.json")
    noted = json.loads((OLDER / "parallel-1.json").read_text())["notes"]
    divided = DividedTraining(saved.problem, saved.plan)
    assert saved.problem.training.software.name == noted["software"]
    assert divided.mfu == pytest.approx(noted["predicted"]["mfu"])
    assert divided.tokens_per_s == pytest.approx(noted["predicted"]["tokens_per_s"])
    assert saved.plan.claims.parts_s["compute"] == noted["predicted"]["compute_s"]
    assert saved.plan.notes["why"] == noted["why"]


def test_older_collective_keeps_its_certificate():
    saved = read_plan(OLDER / "communication-1.json")
    claims = json.loads((OLDER / "communication-1.json").read_text())["claims"]
    assert saved.plan.claims.certificate == claims
    assert saved.plan[Communication].rate_bps(saved.problem.cluster) > 0


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("placement-1", lambda d: d.update(planer=1), "unknown key 'planer'"),
        ("placement-1", lambda d: d["placement"]["device_of"].pop(), "entries, expected"),
        ("placement-1", lambda d: d["placement"].update(devices=["a", "b"]), "not the devices"),
        ("placement-1", lambda d: d["cluster"].update(hash="0" * 64), "another cluster"),
        ("parallel-1", lambda d: d["division"].update(tensor=3), "tensor 3"),
        ("parallel-1", lambda d: d["model"].update(hidden=-1), "hidden"),
        ("parallel-1", lambda d: d.update(predicted=[]), "predicted"),
        ("communication-1", lambda d: d.pop("claims"), "no key 'claims'"),
    ],
)
def test_broken_older_file_is_refused(name, edit, message):
    data = json.loads((OLDER / f"{name}.json").read_text())
    edit(data)
    with pytest.raises(InputFileError) as caught:
        plan_from_data(data, "old.json")
    assert message in caught.value.message
    assert caught.value.where.startswith("old.json")


def test_sections_of_a_file_are_known_without_reading_it_whole(tmp_path):
    assert section_names(OLDER / "parallel-1.json") == {"division", "schedule"}
    assert "placement" in section_names(OLDER / "placement-1.json")
    (tmp_path / "x.json").write_text("{}")
    assert section_names(tmp_path / "x.json") == section_names(tmp_path / "none.json") == set()
