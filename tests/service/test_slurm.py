"""The Slurm executor against a real Slurm: what an executor promises, and what may be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from patience import PATIENCE_S
from service.slurm_cluster import NoSlurmError, SlurmCluster
from service.violations import violations

from hocket.base.errors import RunError
from hocket.fleet.rounds.state import Rules
from hocket.processes import system
from hocket.service.daemon import Daemon
from hocket.service.executors import attempt_folder as files
from hocket.service.executors import slurm
from hocket.service.executors.executor import Assignment, AttemptName, Status
from hocket.service.executors.slurm import SlurmExecutor
from hocket.service.executors.slurm_commands import jobs_of
from hocket.service.spec import JobSpec
from hocket.service.store import Store

T = TypeVar("T")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    try:
        made = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    except NoSlurmError as error:
        pytest.skip(str(error))
    try:
        made.start_all()
        yield made
    except NoSlurmError as error:
        pytest.skip(str(error))
    finally:
        made.close()


class Bench:
    """An executor, and a folder where commands leave traces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.executor = self.another()

    def another(self) -> SlurmExecutor:
        return SlurmExecutor(self.folder / "100% fleet")

    def assignment(
        self, job: int, script: str, devices: tuple[str, ...] = ("nb/0",), **more: object
    ) -> Assignment:
        given: dict[str, object] = {
            "name": AttemptName(job, 1),
            "command": (sys.executable, "-c", script),
            "environment": {"TRACE": str(self.folder / f"trace-{job}")},
            "work_folder": self.folder,
            "log_file": self.folder / f"log-{job}",
            "devices": devices,
            "device_type": "p100",
            "grace_s": 5.0,
        }
        return Assignment(**{**given, **more})  # type: ignore[arg-type]

    def status(self, job: int, attempt: int = 1) -> Status | None:
        name = AttemptName(job, attempt)
        return next((s for s in self.executor.poll().attempts if s.name == name), None)

    def wait(self, job: int, *phases: str) -> Status:
        def reached() -> Status | None:
            status = self.status(job)
            return status if status is not None and status.phase in phases else None

        return wait_for(reached, f"job {job} {phases}")

    def wait_for_controller(self) -> None:
        def answered() -> bool | None:
            try:
                self.executor.poll()
            except RunError:
                return None
            return True

        wait_for(answered, "the controller answers")

    def trace(self, job: int) -> list[str]:
        path = self.folder / f"trace-{job}"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for_trace(self, job: int) -> None:
        wait_for(lambda: self.trace(job) or None, f"trace of {job}")


def wait_for(look: Callable[[], T | None], what: str) -> T:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        found = look()
        if found is not None:
            return found
        time.sleep(0.1)
    raise AssertionError(f"not in time: {what}")


@pytest.fixture
def bench(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    for name, text in cluster.environment.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(slurm, "ASK_EVERY_S", 0.2)
    made = Bench(tmp_path)
    wait_for(lambda: True if len(made.executor.poll().devices) == 8 else None, "all nodes work")
    yield made
    for status in made.executor.poll().attempts:
        made.executor.kill(status.name)


TRACE = "import os; open(os.environ['TRACE'], 'a').write(str(os.getpid()) + '\\n')\n"
SLEEP = TRACE + "import time; time.sleep(60)\n"


def test_devices_are_the_slots_of_the_nodes(bench: Bench) -> None:
    devices = bench.executor.poll().devices
    assert [device.name for device in devices if device.device_type == "v100"] == [
        "na/0", "na/1", "na/2", "na/3",
    ]  # fmt: skip
    assert {device.server for device in devices if device.device_type == "p100"} == {"nb", "nc"}


def test_jobs_run_as_they_are_and_tell_their_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_DAEMON", "x")
    hostile = "$(touch hacked) `touch hacked`; touch hacked \n\"'\\ %j"
    script = (
        "import os, sys; print(sys.argv[1]); print(os.environ['HOCKET_DEVICES']);"
        "print(os.environ['SLURMD_NODENAME'] if 'SLURMD_NODENAME' in os.environ else"
        " os.environ['SLURM_JOB_NODELIST']); print('SECRET_OF_THE_DAEMON' in os.environ);"
        "sys.exit(3)"
    )
    command = (sys.executable, "-c", script, hostile)
    bench.executor.start(
        bench.assignment(1, "", ("na/1", "na/3"), device_type="v100", command=command)
    )
    bench.executor.start(bench.assignment(2, TRACE, ("nb/0", "nb/1"), processes="per-device"))
    assert bench.wait(1, "exited").exit_code == 3
    log = (bench.folder / "log-1").read_text()
    assert log == f"{hostile}\nna/1,na/3\nna\nFalse\n"
    assert bench.wait(2, "exited").exit_code == 0
    assert len(bench.trace(2)) == 2
    assert not list(bench.folder.rglob("hacked"))


def test_an_attempt_runs_once_whoever_starts_it(bench: Bench) -> None:
    assignment = bench.assignment(1, SLEEP)
    bench.executor.start(assignment)
    bench.executor.start(assignment)
    another = bench.another()
    another.start(assignment)
    folder = bench.folder / "100% fleet" / "1-1"
    bench.wait_for_trace(1)
    # As if a daemon had died between the answer of Slurm and its own note of it.
    (folder / "submitted.json").unlink()
    another.start(assignment)
    assert bench.wait(1, "running")
    assert len(jobs_of(another._fleet)[assignment.name]) == 1
    another.kill(assignment.name)
    assert bench.wait(1, "exited").exit_code in (-signal.SIGTERM, -signal.SIGKILL)
    another.start(assignment)
    another.forget(assignment.name)
    another.start(assignment)
    assert bench.status(1) is None
    (refused,) = another.poll().attempts
    assert "has ended before" in refused.detail
    assert len(bench.trace(1)) == 1


def test_a_second_submission_finds_the_first(bench: Bench, cluster: SlurmCluster) -> None:
    assignment = bench.assignment(1, SLEEP)
    bench.executor.start(assignment)
    bench.wait_for_trace(1)
    folder = bench.folder / "100% fleet" / "1-1"
    number = cluster.call(
        "sbatch", "--parsable", "--nodelist=nc", f"--output={bench.folder}/second",
        str(bench.folder / "100% fleet" / "batch.sh"),
        sys.executable, "-m", "hocket.service.executors.slurm_batch", str(folder),
    ).strip()  # fmt: skip

    def second_ended() -> bool | None:
        state = cluster.call("squeue", "-h", "-j", number, "-t", "all", "-o", "%T").strip()
        return True if state == "COMPLETED" else None

    wait_for(second_ended, "the second supervisor ends without an error")
    assert bench.wait(1, "running")
    assert len(bench.trace(1)) == 1


@pytest.mark.parametrize(
    ("options", "phase"),
    [
        pytest.param(None, "exited", id="stopped by the fleet"),
        pytest.param(("--batch", "--signal=TERM"), "lost", id="warned of a time limit"),
        pytest.param((), "lost", id="cancelled in Slurm"),
    ],
)
def test_whoever_stops_it_gives_time_to_save(
    bench: Bench, options: tuple[str, ...] | None, phase: str
) -> None:
    """What obeys with exit code 0 is not done, and only the fleet itself knows that it asked."""
    script = TRACE + (
        "import signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(1); open(os.environ['TRACE'], 'a').write('saved\\n'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open(os.environ['TRACE'], 'a').write('ready\\n')\n"
        "time.sleep(60)\n"
    )
    bench.executor.start(bench.assignment(1, script))
    wait_for(lambda: "ready" in bench.trace(1) or None, "ready")
    if options is None:
        bench.executor.stop(AttemptName(1, 1), 10.0)
    else:
        submitted = files.read_json(bench.folder / "100% fleet" / "1-1" / slurm._SUBMITTED)
        assert submitted is not None
        subprocess.run(["scancel", *options, str(submitted["id"])], check=True)
    status = bench.wait(1, "exited", "lost")
    assert (status.phase, status.was_asked) == (phase, True)
    assert bench.trace(1)[-1] == "saved"


def test_what_is_stopped_before_it_began_never_begins(bench: Bench) -> None:
    bench.executor.start(bench.assignment(1, SLEEP, ("nb/0", "nb/1")))
    bench.wait_for_trace(1)
    bench.executor.start(bench.assignment(2, TRACE))
    assert bench.wait(2, "starting")
    bench.executor.stop(AttemptName(2, 1), 5.0)
    assert bench.wait(2, "exited").exit_code == -signal.SIGTERM
    bench.executor.stop(AttemptName(3, 1), 5.0)
    bench.executor.start(bench.assignment(3, TRACE, ("nc/0",)))
    assert bench.wait(3, "exited").exit_code == -signal.SIGTERM
    bench.executor.kill(AttemptName(1, 1))
    bench.wait(1, "exited")
    assert not bench.trace(2)
    assert not bench.trace(3)


def test_a_gang_may_have_unequal_parts_of_several_nodes(bench: Bench) -> None:
    script = TRACE + "print(os.environ.get('SLURM_HET_SIZE'))"
    bench.executor.start(bench.assignment(1, script, ("nb/0", "nb/1", "nc/1")))
    assert bench.wait(1, "exited").exit_code == 0
    assert (bench.folder / "log-1").read_text() == "2\n"
    assert len(bench.trace(1)) == 1


def test_impossible_requests_end_with_the_reason(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.executor.start(bench.assignment(1, TRACE, ("elsewhere/0",)))
    assert "elsewhere" in bench.wait(1, "lost").detail
    bench.executor.start(bench.assignment(2, TRACE, ("nb/0", "nc/0"), processes="per-device"))
    ended = bench.wait(2, "exited")
    assert (ended.exit_code, "several nodes" in ended.detail) == (126, True)
    many = tuple(f"nb/{slot}" for slot in range(50))
    bench.executor.start(bench.assignment(3, TRACE, many))
    assert "not so many" in bench.wait(3, "lost").detail
    monkeypatch.setenv("SBATCH_PARTITION", "none")
    choosy = SlurmExecutor(bench.folder / "choosy")
    choosy.start(bench.assignment(1, TRACE))
    (refused,) = choosy.poll().attempts
    assert (refused.phase, "artition" in refused.detail) == ("exited", True)


# ── what may be killed ───────────────────────────────────────────────────────────────────────────


def is_alive(pid: int) -> bool:
    return system.process(pid) is not None


def test_a_killed_supervisor_is_a_lost_attempt(bench: Bench) -> None:
    bench.executor.start(bench.assignment(1, SLEEP))
    bench.wait_for_trace(1)
    begun = files.read_json(bench.folder / "100% fleet" / "1-1" / files.BEGUN)
    assert begun is not None
    os.kill(begun["pid"], signal.SIGKILL)
    lost = bench.wait(1, "lost")
    assert "FAILED" in lost.detail
    assert not is_alive(int(bench.trace(1)[0]))


def test_a_dead_controller_loses_nothing(bench: Bench, cluster: SlurmCluster) -> None:
    bench.executor.start(bench.assignment(1, SLEEP))
    bench.wait_for_trace(1)
    assert bench.wait(1, "running")
    began_s = time.time()
    # Slurm writes its jobs down some seconds after any of them changed.
    cluster.call(
        "sbatch", "--hold", "--output=/dev/null", str(bench.folder / "100% fleet/batch.sh")
    )
    wait_for(lambda: True if cluster.has_saved_since(began_s) else None, "Slurm saved its jobs")
    cluster.kill("slurmctld")
    bench.executor.start(bench.assignment(2, TRACE, ("nc/0",)))
    with pytest.raises(RunError):
        bench.executor.poll()
    cluster.start("slurmctld")
    bench.wait_for_controller()
    assert len(bench.executor.poll().devices) == 8, "it has yet to hear of its nodes"
    assert bench.wait(2, "exited").exit_code == 0
    assert bench.wait(1, "running")
    bench.executor.kill(AttemptName(1, 1))
    assert bench.wait(1, "exited")
    assert len(bench.trace(1)) == len(bench.trace(2)) == 1


def test_a_job_that_slurm_forgot_is_lost_and_ended(bench: Bench, cluster: SlurmCluster) -> None:
    bench.executor.start(bench.assignment(1, SLEEP))
    bench.wait_for_trace(1)
    assert bench.wait(1, "running")
    cluster.kill("slurmctld")
    cluster.start("slurmctld", "-c")
    bench.wait_for_controller()
    assert bench.wait(1, "lost")
    assert not is_alive(int(bench.trace(1)[0])), "its devices may be given away"


def test_a_dead_node_loses_its_attempt_and_its_devices(bench: Bench, cluster: SlurmCluster) -> None:
    bench.executor.start(bench.assignment(1, SLEEP, ("nc/0",)))
    bench.wait_for_trace(1)
    cluster.lose("nc")
    assert "NODE_FAIL" in bench.wait(1, "lost").detail
    servers = {device.server for device in bench.executor.poll().devices}
    assert servers == {"na", "nb"}
    pid = int(bench.trace(1)[0])
    wait_for(lambda: True if not is_alive(pid) else None, "what the node ran has ended")
    cluster.start("nc")
    wait_for(lambda: True if len(bench.executor.poll().devices) == 8 else None, "the node is back")
    bench.executor.start(bench.assignment(1, TRACE, ("nc/0",), name=AttemptName(1, 2)))

    def next_ended() -> bool | None:
        status = bench.status(1, 2)
        return True if status is not None and status.phase == "exited" else None

    wait_for(next_ended, "the next attempt")
    assert len(bench.trace(1)) == 2


def test_the_daemon_runs_a_job_again_whose_supervisor_was_killed(bench: Bench) -> None:
    script = TRACE + (
        "import sys, time\ntime.sleep(60 if os.environ['HOCKET_ATTEMPT'] == '1' else 0)\n"
    )
    spec = JobSpec(
        name="job",
        command=(sys.executable, "-c", script),
        environment={"TRACE": str(bench.folder / "trace-1")},
        throughputs={"p100": 1.0},
    )
    with contextlib.closing(Store.open(bench.folder / "state")) as store:
        daemon = Daemon(store, bench.executor, Rules(round_s=2.0), ("v100", "p100"))
        daemon.start()
        try:
            number = daemon.submit(spec).number
            bench.wait_for_trace(1)
            begun = files.read_json(bench.folder / "100% fleet" / f"{number}-1" / files.BEGUN)
            assert begun is not None
            os.kill(begun["pid"], signal.SIGKILL)
            wait_for(
                lambda: True if daemon.job(number).status == "succeeded" else None, "it succeeds"
            )
            first, second = daemon.store.attempts(number)
            assert (first.outcome, second.outcome) == ("lost", "finished")
            assert len(bench.trace(1)) == 2
            assert violations(daemon.service_state) == []
        finally:
            daemon.close()
