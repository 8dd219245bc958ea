"""Parts handed to a fleet: one job each, all waited for, none left behind."""

import sys

import pytest

from hocket.base.errors import RunError
from hocket.classes.on_fleet import train_on_fleet
from hocket.service.spec import JobSpec


class Fleet:
    """A service whose jobs end as they are told to."""

    def __init__(self, ends):
        self.ends, self.jobs, self.cancelled = ends, {}, []

    def submit(self, spec):
        number = 7 + len(self.jobs)
        self.jobs[number] = JobSpec.model_validate(spec)
        return {"id": number}

    def get_patiently(self, path, patience_s):
        number = int(path.rpartition("/")[2])
        return {"status": self.ends[number - 7], "message": "exit code 1"}

    def delete(self, path):
        self.cancelled.append(int(path.rpartition("/")[2]))


def test_every_part_is_a_job_that_runs_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "src")
    fleet = Fleet(["succeeded"] * 2)
    told = []
    (tmp_path / "parts/work").mkdir(parents=True)
    train_on_fleet(
        fleet,
        (tmp_path / "parts/work").relative_to(tmp_path),
        [0, 3],
        lambda *far: told.append(far),
    )
    folder = str(tmp_path / "parts/work")
    assert [job.command for job in fleet.jobs.values()] == [
        (sys.executable, "-P", "-m", "hocket.classes.part_job", folder, index) for index in "03"
    ]
    assert {job.environment["PYTHONPATH"] for job in fleet.jobs.values()} == {str(tmp_path / "src")}
    assert fleet.cancelled == []
    assert told[0] == ("parts trained by the fleet", 0, 2)


def test_a_job_that_fails_is_named_and_the_others_are_cancelled(tmp_path):
    fleet = Fleet(["running", "failed", "running"])
    with pytest.raises(RunError, match="job 8, which trained part 1, has failed: exit code 1"):
        train_on_fleet(fleet, tmp_path, [0, 1, 2], lambda *far: None)
    assert fleet.cancelled == [7, 8, 9]
