"""What a machine with GPUs offers, and which of them a job sees."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from service.local_attempts import assignment

from hocket.base.errors import UsageError
from hocket.cli.fleet.given import parse_cluster
from hocket.cli.root import root
from hocket.service.executors import local_devices
from hocket.service.executors.local_devices import found_devices, with_cuda
from hocket.service.serve import ServeSettings, open_engine
from hocket.service.server_config import ServerConfig, UserLimits


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine whose nvidia-smi lists these models."""

    def having(*models: str) -> None:
        lines = "".join(f"{model}, 16160 MiB, 3, 16\\n" for model in models)
        program = tmp_path / "bin/nvidia-smi"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return having


def shown(devices) -> list[str]:
    """The numbers that the job of each device is told."""
    works = [
        assignment(Path("/x"), "true", device_type=one.device_type, devices=(one.name,))
        for one in devices
    ]
    return [with_cuda(work).environment["CUDA_VISIBLE_DEVICES"] for work in works]


def test_gpus_are_found_with_the_numbers_of_nvidia_smi(machine):
    machine("Tesla V100-SXM2-16GB", "NVIDIA L40", "Tesla V100-SXM2-16GB")
    devices = found_devices()
    assert [one.name for one in devices] == ["v100-16g-0", "nvidia-l40-1", "v100-16g-2"]
    assert shown(devices) == ["0", "1", "2"]
    assert len({one.server for one in devices}) == 1, "all are in one machine"


@pytest.mark.parametrize(("told", "names"), [("2,0", ["t4-0", "t4-2"]), ("", []), ("7", [])])
def test_only_gpus_that_were_left_to_the_service_are_found(machine, monkeypatch, told, names):
    machine("Tesla T4", "Tesla T4", "Tesla T4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    assert [one.name for one in found_devices()] == names


def test_gpus_that_are_named_otherwise_are_refused(machine, monkeypatch):
    machine("Tesla T4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c")
    with pytest.raises(UsageError, match="by their numbers"):
        found_devices()


def test_gpus_of_several_types_are_numbered_through(tmp_path):
    """`--devices v100:2,p100:2` once gave device 0 to jobs on v100-0 and on p100-0."""
    _, devices = parse_cluster("v100:2,cpu:2,p100:2")
    engine = open_engine(ServeSettings(folder=tmp_path, devices=devices), tmp_path, None)
    polled = engine.poll().devices
    engine.close()
    assert [one.name for one in polled if one.device_type == "cpu"] == ["cpu-0", "cpu-1"]
    assert shown(one for one in polled if one.device_type != "cpu") == ["0", "1", "2", "3"]


def test_one_type_keeps_its_names(tmp_path):
    _, devices = parse_cluster("v100:2x4")
    engine = open_engine(ServeSettings(folder=tmp_path, devices=devices), tmp_path, None)
    assert engine.poll().devices == devices
    engine.close()


@pytest.mark.parametrize(
    ("models", "arguments", "device_types", "names", "said"),
    [
        (("NVIDIA H200",) * 2, (), ("h200-141g",), ("h200-141g-0", "h200-141g-1"), "found h200"),
        (("Tesla T4",), ("--devices", "v100:1"), ("v100",), ("v100-0",), ""),
        ((), (), None, None, "no GPU was found"),
        (("Tesla T4",), ("--device-types", "t4"), None, None, "--device-types is for agents"),
    ],
)
def test_serve_takes_the_gpus_of_the_machine_unless_told_otherwise(
    machine, monkeypatch, tmp_path, models, arguments, device_types, names, said
):
    machine(*models)
    served = []
    monkeypatch.setattr(
        "hocket.service.serve.serve", lambda settings, tell: served.append(settings)
    )
    command = ["fleet", "serve", "--state", str(tmp_path / "state"), *arguments]
    answer = CliRunner().invoke(root, command)
    assert said in f"{answer.output} {answer.exception}"
    assert [settings.device_types for settings in served] == (
        [] if device_types is None else [device_types]
    )
    for settings in served:
        assert tuple(one.name for one in settings.devices) == names


@pytest.mark.parametrize(("user", "message"), [(0, "run as root"), (1000, "is not root")])
def test_a_warning_says_as_whom_jobs_run(monkeypatch, user, message):
    monkeypatch.setattr(local_devices.os, "geteuid", lambda: user)
    config = ServerConfig(users={"ann": UserLimits(unix_user="ann" if user else "")})
    assert any(message in warning for warning in local_devices.limit_warnings((), config))
    assert not any("root" in one for one in local_devices.limit_warnings((), ServerConfig()))
