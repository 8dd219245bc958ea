"""What Slurm says of its nodes, what is asked of it, and how often."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.base.errors import UsageError
from hocket.service.executors import slurm_batch, slurm_commands
from hocket.service.executors.attempt_folder import (
    BEGUN,
    Result,
    read_assignment,
    write_assignment,
    write_json,
)
from hocket.service.executors.executor import EXITED, LOST, Assignment, AttemptName
from hocket.service.executors.slurm import SlurmExecutor, _status_of
from hocket.service.executors.slurm_commands import SlurmJob, parts_of
from hocket.service.executors.slurm_nodes import devices_per_node, parse_nodes

GPU_NODE = (
    "NodeName=g1 Arch=x86_64 CoresPerSocket=16 CPUTot=64 AvailableFeatures=fast,ib "
    "ActiveFeatures=fast,ib Gres=gpu:a100:4(S:0-1),nvme:1 OS=Linux 6.1 #1 SMP State=MIXED "
    "ThreadsPerCore=2 Reason=State=DOWN says someone State=DOWN [root@x]"
)
CORE_NODE = "NodeName=c1 CPUTot=8 ActiveFeatures=ib,v100 Gres=(null) State=IDLE ThreadsPerCore=2"


def test_devices_are_gpus_or_cores() -> None:
    nodes = parse_nodes(f"{GPU_NODE}\n{CORE_NODE}\n")
    assert [(node.device_type, node.num_devices) for node in nodes.values()] == [
        ("a100", 4),
        ("ib", 4),
    ]
    assert [device.name for device in nodes["g1"].devices] == ["g1/0", "g1/1", "g1/2", "g1/3"]
    assert {device.server for device in nodes["g1"].devices} == {"g1"}
    only = parse_nodes(f"{GPU_NODE}\n{CORE_NODE}\n", device_types=("v100",))
    assert [(node.name, node.device_type) for node in only.values()] == [("c1", "v100")]


@pytest.mark.parametrize(
    ("state", "works"),
    [
        ("IDLE", True),
        ("ALLOCATED", True),
        ("MIXED+PLANNED", True),
        ("IDLE*", True),
        ("DOWN*", False),
        ("IDLE+DRAIN", False),
        ("MIXED+DRAIN", False),
        ("UNKNOWN", False),
        ("IDLE+CLOUD+POWERED_DOWN", False),
        ("", False),
    ],
)
def test_only_working_nodes_have_devices(state: str, works: bool) -> None:
    assert bool(parse_nodes(CORE_NODE.replace("State=IDLE", f"State={state}"))) == works


@pytest.mark.parametrize("name", ["a,b", "a|b", "-x", "a;b", "$(x)", "a&b", ""])
def test_names_that_options_would_read_are_left_out(name: str) -> None:
    assert not parse_nodes(CORE_NODE.replace("NodeName=c1", f"NodeName={name}"))
    if "," not in name:
        assert not parse_nodes(CORE_NODE.replace("=ib,v100", f"={name}"))


def test_a_controller_that_knows_nothing_yet_takes_no_devices_away() -> None:
    text = CORE_NODE.replace("State=IDLE", "State=UNKNOWN*")
    assert not parse_nodes(text)
    assert parse_nodes(text, before=("c1",))


def test_a_gang_asks_for_exactly_its_slots() -> None:
    nodes = parse_nodes(f"{GPU_NODE}\n{CORE_NODE}\n{CORE_NODE.replace('c1', 'c2')}")
    (gpus,) = parts_of(devices_per_node(["g1/0", "g1/2", "g1/3"]), nodes)
    assert {"--nodelist=g1", "--gres=gpu:a100:3"} <= set(gpus)
    even = parts_of(devices_per_node(["c1/0", "c2/0", "c1/1", "c2/3"]), nodes)
    assert len(even) == 1
    assert {"--nodelist=c1,c2", "--nodes=2", "--cpus-per-task=4", "-Cib"} <= set(even[0])
    uneven = parts_of(devices_per_node(["c1/0", "c1/1", "c2/3"]), nodes)
    assert [part[0] for part in uneven] == ["--nodelist=c1", "--nodelist=c2"]


def test_without_slurm_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="sbatch"):
        SlurmExecutor(tmp_path / "fleet")


def test_slurm_is_asked_now_and_then_and_always_after_a_submission(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    jobs: dict[AttemptName, list[SlurmJob]] = {}
    assignment = Assignment(
        name=AttemptName(1, 1),
        command=("true",),
        environment={},
        work_folder=tmp_path,
        log_file=tmp_path / "log",
        devices=("c1/0",),
        device_type="ib",
    )

    def submit(*_: object) -> str:
        jobs[assignment.name] = [SlurmJob(id="17", state="PENDING")]
        return "17"

    monkeypatch.setattr(slurm_commands, "require_slurm", lambda: None)
    monkeypatch.setattr(slurm_commands, "submit", submit)
    monkeypatch.setattr(slurm_commands, "show_nodes", lambda: asked.append("nodes") or CORE_NODE)
    monkeypatch.setattr(slurm_commands, "jobs_of", lambda _: asked.append("jobs") or dict(jobs))
    executor = SlurmExecutor(tmp_path / "fleet")
    for _ in range(3):
        assert len(executor.poll().devices) == 4
    assert asked == ["jobs", "nodes"]
    executor.start(assignment)
    for _ in range(3):
        assert [status.phase for status in executor.poll().attempts] == ["starting"]
    assert asked == ["jobs", "nodes", "jobs", "jobs", "nodes"]
    executor.forget(assignment.name)
    assert executor.poll().attempts, "it has not ended"


@pytest.mark.parametrize(
    ("exit_code", "was_asked", "phase"), [(0, False, EXITED), (0, True, LOST), (-15, True, LOST)]
)
def test_what_slurm_gave_up_is_lost_unless_it_was_done_by_itself(
    exit_code: int, was_asked: bool, phase: str
) -> None:
    result = Result(exit_code, "", was_asked=was_asked)
    assert (
        _status_of(AttemptName(1, 1), result, {"detail": "lost by Slurm: TIMEOUT"}).phase == phase
    )


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_batch_job_gives_its_commands_what_slurm_says(tmp_path, monkeypatch, has_begun) -> None:
    order = Assignment(
        name=AttemptName(1, 1), command=("true",), environment={"SLURM_NTASKS": "own"},
        work_folder=tmp_path, log_file=tmp_path / "log", devices=("g1/0",), device_type="a100",
    )  # fmt: skip
    write_assignment(tmp_path, order)
    if has_begun:
        write_json(tmp_path / BEGUN, {})
    for name, text in (
        ("SLURM_JOB_ID", "7"), ("SLURM_NTASKS", "3"), ("CUDA_VISIBLE_DEVICES", "2"), ("X", "y")
    ):  # fmt: skip
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(slurm_batch, "run_attempt", lambda folder: 5)
    assert slurm_batch.run_batch(str(tmp_path)) == 5
    found = read_assignment(tmp_path)
    assert found is not None
    given = {"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "2"}
    expected = {"SLURM_NTASKS": "own", **({} if has_begun else given)}
    kept = {name: found.environment.get(name) for name in (*given, "SLURM_NTASKS", "X")}
    assert {name: text for name, text in kept.items() if text is not None} == expected


def test_nodes_of_one_count_that_name_their_devices_differently_get_their_own_options() -> None:
    named = "NodeName=n1 ActiveFeatures=fast Gres=gpu:v100:4 State=IDLE"
    plain = "NodeName=n2 ActiveFeatures=v100 Gres=gpu:4 State=IDLE"
    twin = "NodeName=n3 ActiveFeatures=fast Gres=gpu:v100:4 State=IDLE"
    nodes = parse_nodes(f"{named}\n{plain}\n{twin}\n")
    assert {node.device_type for node in nodes.values()} == {"v100"}
    parts = parts_of(dict.fromkeys(nodes, 4), nodes)
    assert [(part[0], part[-1]) for part in parts] == [
        ("--nodelist=n1,n3", "--gres=gpu:v100:4"),
        ("--nodelist=n2", "--gres=gpu:4"),
    ]


def test_cores_of_nodes_with_other_threads_are_asked_for_apart() -> None:
    nodes = parse_nodes(
        f"{CORE_NODE}\n" + CORE_NODE.replace("c1", "c2").replace("Core=2", "Core=1")
    )
    parts = parts_of({"c1": 2, "c2": 2}, nodes)
    assert [part[-2] for part in parts] == ["--cpus-per-task=4", "--cpus-per-task=2"]
