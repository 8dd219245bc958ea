"""The local executor with real processes: ends, stops, gangs and environments."""

import json
import signal
import subprocess
import sys
import time

import pytest
from service.local_attempts import (
    DEVICES,
    NAME,
    OBEYS,
    REFUSES,
    WAITS,
    WITH_GRANDCHILD,
    assignment,
    executor_in,
    folder_of,
    is_alive,
    left_of,
    pids,
    python,
    status_of,
    supervisor_of,
    wait_for_end,
    wait_for_phase,
    wait_for_text,
)

from hocket.processes import system
from hocket.service.executors import attempt_folder
from hocket.service.executors.executor import EXITED, RUNNING, AttemptName
from hocket.service.executors.local_devices import with_cuda

# ── ends ──


def test_a_command_that_ends_well(executor, tmp_path):
    code = "import sys; print('out'); print('err', file=sys.stderr); print('last')"
    executor.start(assignment(tmp_path, *python(code)))
    status = wait_for_end(executor)
    assert (status.phase, status.exit_code, status.detail) == (EXITED, 0, "")
    assert (tmp_path / "log").read_text() == "out\nerr\nlast\n"
    assert executor.poll().devices == DEVICES


def test_a_command_that_fails(executor, tmp_path):
    executor.start(assignment(tmp_path, *python("raise SystemExit(3)")))
    status = wait_for_end(executor)
    assert (status.phase, status.exit_code) == (EXITED, 3)
    assert status.detail == "the command ended with code 3"


def test_a_command_that_is_killed(executor, tmp_path):
    executor.start(assignment(tmp_path, *python("import os; os.kill(os.getpid(), 9)")))
    status = wait_for_end(executor)
    assert (status.phase, status.exit_code) == (EXITED, -9)
    assert "SIGKILL" in status.detail


@pytest.mark.parametrize(
    "changes",
    [
        {"command": ("no-such-program",)},
        {"work_folder": "/no/such/folder"},
        {"command": ("true", "nul\0byte")},
        {"log_file": "/proc/no/log"},
    ],
)
def test_what_cannot_be_run_is_told(executor, tmp_path, changes):
    executor.start(assignment(tmp_path, "true")._replace(**changes))
    status = wait_for_end(executor)
    assert (status.phase, status.exit_code) == (EXITED, 127)
    assert status.detail.startswith(("cannot ", "its folder '/no/such/folder' is not there"))


def test_nothing_is_left_when_an_attempt_has_ended(executor, tmp_path):
    executor.start(assignment(tmp_path, *python(WITH_GRANDCHILD)))
    assert wait_for_end(executor).exit_code == 0
    assert not any(is_alive(pid) for pid in pids(tmp_path / "pids", 2))
    assert not left_of(tmp_path)


def test_hostile_text_stays_an_argument(executor, tmp_path):
    texts = [
        "; touch hacked",
        "$(touch hacked)",
        "`touch hacked`",
        "a\ntouch hacked",
        "-rf *",
        "'\"",
    ]
    variables = {f"TEXT_{number}": text for number, text in enumerate(texts)}
    code = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    executor.start(assignment(tmp_path, *python(code), *texts, environment=variables))
    assert wait_for_end(executor).exit_code == 0
    arguments, environment = json.loads((tmp_path / "log").read_text())
    assert arguments == texts
    assert variables.items() <= environment.items()
    assert not (tmp_path / "hacked").exists()


# ── stops ──


def test_sigterm_is_enough_for_what_obeys(executor, tmp_path):
    executor.start(assignment(tmp_path, *python(OBEYS)))
    wait_for_text(tmp_path / "log", "ready")
    assert wait_for_phase(executor, RUNNING)
    executor.stop(NAME, 20.0)
    status = wait_for_end(executor)
    assert (status.phase, status.exit_code) == (EXITED, 4)
    assert "leaving" in (tmp_path / "log").read_text()


def test_sigkill_follows_where_sigterm_is_ignored(executor, tmp_path):
    executor.start(assignment(tmp_path, *python(WITH_GRANDCHILD + REFUSES)))
    wait_for_text(tmp_path / "log", "ready")
    executor.stop(NAME, 0.2)
    status = wait_for_end(executor)
    assert (status.phase, status.exit_code) == (EXITED, -9)
    assert not any(is_alive(pid) for pid in pids(tmp_path / "pids", 2))


def test_kill_shortens_the_grace(executor, tmp_path):
    executor.start(assignment(tmp_path, *python(REFUSES)))
    wait_for_text(tmp_path / "log", "ready")
    executor.stop(NAME, 1000.0)
    assert status_of(executor).phase == RUNNING
    executor.kill(NAME)
    executor.stop(NAME, 1000.0)
    assert wait_for_end(executor).exit_code == -9


def test_a_halted_command_can_still_obey(executor, tmp_path):
    executor.start(assignment(tmp_path, *python(OBEYS)))
    wait_for_text(tmp_path / "log", "ready")
    for found in left_of(tmp_path):
        system.send(found, signal.SIGSTOP)
    executor.stop(NAME, 20.0)
    assert wait_for_end(executor).exit_code == 4


def test_what_loads_data_is_left_alone_until_its_command_has_ended(executor, tmp_path):
    loader = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('loader', flush=True), 1 / 0))\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    saves = f"""
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", {loader!r}])
def save(*_):
    time.sleep(0.3); print("saved", child.poll(), flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, save)
time.sleep(60)
"""
    executor.start(assignment(tmp_path, *python(saves)))
    wait_for_text(tmp_path / "log", "ready")
    executor.stop(NAME, 20.0)
    assert wait_for_end(executor).exit_code == 0
    assert (tmp_path / "log").read_text().startswith("ready\nsaved None\nloader\n")


def test_what_a_shell_script_runs_gets_the_grace_too(executor, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text('"$1" -S -c "$2"\necho after\n')
    slow = OBEYS.replace("print", "time.sleep(0.3); print", 1)
    executor.start(assignment(tmp_path, "sh", str(script), sys.executable, slow))
    wait_for_text(tmp_path / "log", "ready")
    executor.stop(NAME, 20.0)
    assert wait_for_end(executor).exit_code == -signal.SIGTERM
    assert (tmp_path / "log").read_text() == "ready\nleaving\n"


def test_an_attempt_that_was_stopped_before_it_began_never_runs(executor, tmp_path):
    executor.stop(NAME, 5.0)
    executor.start(assignment(tmp_path, "touch", "ran"))
    status = wait_for_end(executor)
    assert (status.phase, status.exit_code) == (EXITED, -signal.SIGTERM)
    executor.start(assignment(tmp_path, "touch", "ran"))
    assert attempt_folder.read_result(folder_of(tmp_path)).detail == "stopped before it began"
    assert not (tmp_path / "ran").exists()


def test_a_stop_right_after_the_start_ends_it_too(executor, tmp_path):
    names = [AttemptName(number, 1) for number in range(1, 6)]
    for name in names:
        executor.start(assignment(tmp_path, *python(WAITS), name=name))
        executor.stop(name, 5.0)
    for name in names:
        assert wait_for_end(executor, name).exit_code == -signal.SIGTERM


def test_stop_and_kill_of_unknown_attempts_are_no_errors(executor):
    executor.stop(NAME, 1.0)
    executor.kill(AttemptName(8, 1))
    assert [status.phase for status in executor.poll().attempts] == [EXITED, EXITED]
    executor.forget(NAME)
    executor.forget(AttemptName(8, 1))
    executor.forget(AttemptName(9, 9))
    assert not executor.poll().attempts


# ── gangs and environments ──

TELLS_RANK = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HOCKET_DEVICES")
# In one piece: print writes the end of the line on its own, and others write meanwhile.
sys.stdout.write(json.dumps([os.environ[name] for name in names]) + "\\n")
"""


def test_a_gang_of_processes_knows_its_ranks(executor, tmp_path):
    executor.start(assignment(tmp_path, *python(TELLS_RANK), processes="per-device"))
    assert wait_for_end(executor).exit_code == 0
    told = sorted(json.loads(line) for line in (tmp_path / "log").read_text().splitlines())
    port = told[0][4]
    assert 0 < int(port) < 65536
    shared = ["2", "127.0.0.1", port, "v100-0,v100-1"]
    assert told == [["0", "0", *shared], ["1", "1", *shared]]


def test_one_rank_that_fails_ends_the_others(executor, tmp_path):
    code = f"import os\nif os.environ['RANK'] == '1': raise SystemExit(5)\n{OBEYS}"
    executor.start(assignment(tmp_path, *python(code), processes="per-device"))
    status = wait_for_end(executor)
    assert (status.exit_code, status.detail) == (5, "rank 1 ended with code 5")
    assert not left_of(tmp_path)


def test_ranks_may_end_one_after_another(executor, tmp_path):
    code = "import os, time; time.sleep(0.4 * int(os.environ['RANK'])); print('done')"
    executor.start(assignment(tmp_path, *python(code), processes="per-device"))
    assert wait_for_end(executor).exit_code == 0
    assert (tmp_path / "log").read_text() == "done\ndone\n"


def test_the_environment_is_an_allow_list(executor, tmp_path, monkeypatch):
    monkeypatch.setenv("HOCKET_FLEET_TOKEN", "secret")
    monkeypatch.setenv("DATABASE_PASSWORD", "secret")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    given = {"MINE": "1", "HOCKET_DEVICES": "forged", "PATH": "/mine"}
    executor.start(assignment(tmp_path, *python(code), environment=given))
    assert wait_for_end(executor).exit_code == 0
    found = json.loads((tmp_path / "log").read_text())
    assert "secret" not in found.values()
    assert found["LC_ALL"] == "C.UTF-8"
    assert (found["MINE"], found["PATH"]) == ("1", "/mine")
    assert (found["HOCKET_DEVICES"], found["HOCKET_DEVICE_TYPE"]) == ("v100-0,v100-1", "v100")
    assert found["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.parametrize(
    ("device_type", "devices", "given", "visible"),
    [
        ("a100-80g", ("gpu3", "gpu10"), {}, "3,10"),
        ("cpu", ("cpu0",), {}, None),
        ("mi300", ("x0",), {}, None),
        ("tpu-v4", ("x0",), {}, None),
        ("h100", ("left", "x1"), {}, None),
        ("h100", ("x1",), {"CUDA_VISIBLE_DEVICES": "5"}, "5"),
    ],
)
def test_cuda_devices_are_named_by_their_index(tmp_path, device_type, devices, given, visible):
    work = assignment(tmp_path, "true", device_type=device_type, devices=devices, environment=given)
    assert with_cuda(work).environment.get("CUDA_VISIBLE_DEVICES") == visible


def test_the_log_keeps_its_beginning_and_its_end(tmp_path):
    executor = executor_in(tmp_path, log_limit_bytes=100_000)
    code = "for number in range(100_000): print(number)"
    executor.start(assignment(tmp_path, *python(code)))
    assert wait_for_end(executor).exit_code == 0
    executor.close()
    log = (tmp_path / "log").read_text()
    assert len(log) <= 100_000
    assert log.startswith("0\n1\n2\n")
    assert log.endswith("99998\n99999\n")
    assert "bytes dropped here" in log


def test_a_log_may_have_one_gibibyte(executor, tmp_path):
    executor.start(assignment(tmp_path, "true"))
    order = attempt_folder.read_assignment(folder_of(tmp_path))
    assert order is not None
    assert order.log_limit_bytes == 1 << 30, "as docs/how-to/fleet_local.md states"
    assert wait_for_end(executor).exit_code == 0


def test_a_supervisor_rests_while_its_command_is_silent(executor, tmp_path):
    code = (
        "import os, time; open('pids', 'w').write('1\\n'); os.close(1); os.close(2); time.sleep(60)"
    )
    executor.start(assignment(tmp_path, *python(code)))
    pids(tmp_path / "pids", 1)
    pid = supervisor_of(tmp_path)
    before = _cpu_ticks(pid)
    time.sleep(1.0)
    assert _cpu_ticks(pid) - before <= 5


def _cpu_ticks(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_supervisor_loads_little():
    code = (
        "import sys, hocket.service.executors.supervisor\n"
        "print({'numpy', 'pydantic', 'asyncio', 'dataclasses'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
