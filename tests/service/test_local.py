"""The local executor with real processes: ends, stops, kills, restarts."""

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from service.local_attempts import (
    DEVICES,
    NAME,
    assignment,
    executor_in,
    folder_of,
    is_alive,
    kill_everything,
    left_of,
    pids,
    python,
    status_of,
    supervisor_of,
    wait_for_end,
    wait_for_phase,
    wait_for_text,
    wait_until,
)

from hocket.errors import RunError
from hocket.service.executors import attempt_folder, local, processes, supervisor
from hocket.service.executors.executor import EXITED, LOST, RUNNING, STARTING, AttemptName

WAITS = "import time; print('ready', flush=True); time.sleep(60)"
OBEYS = """
import signal, sys, time
def leave(*_):
    print("leaving", flush=True); sys.exit(4)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
time.sleep(60)
"""
REFUSES = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""
WITH_GRANDCHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"],
                         start_new_session=True)
with open("pids", "a") as file:
    file.write(f"{os.getpid()}\\n{child.pid}\\n")
"""


@pytest.fixture
def executor(tmp_path):
    made = executor_in(tmp_path)
    yield made
    kill_everything(tmp_path)
    made.close()


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
    executor.start(replace(assignment(tmp_path, "true"), **changes))
    status = wait_for_end(executor)
    assert (status.phase, status.exit_code) == (EXITED, 127)
    assert status.detail.startswith("cannot ")


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


DAEMONIZES = """
import os, signal, time
first = os.fork()
if first == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.clear()
    with open("pids", "a") as file:
        file.write(f"{os.getpid()}\\n")
    if HALTS:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
os.waitpid(first, 0)
while not os.path.exists("pids") or not os.path.getsize("pids"):
    time.sleep(0.01)
print("ready", flush=True)
"""


@pytest.mark.parametrize("halts", [False, True])
@pytest.mark.parametrize("end", ["by itself", "stop", "kill -9"])
def test_no_daemon_outlives_its_attempt(executor, tmp_path, halts, end):
    """Though it left its session, lost its parents, ignores SIGTERM and perhaps is halted."""
    code = DAEMONIZES.replace("HALTS", str(halts))
    waits = "" if end == "by itself" else "time.sleep(60)"
    executor.start(assignment(tmp_path, *python(code + waits), grace_s=0.3))
    (daemon,) = pids(tmp_path / "pids", 1)
    wait_for_text(tmp_path / "log", "ready")
    if end == "stop":
        executor.stop(NAME, 0.3)
    if end == "kill -9":
        os.kill(supervisor_of(tmp_path), signal.SIGKILL)
    status = wait_for_end(executor)
    assert not is_alive(daemon)
    expected = {"by itself": (EXITED, 0), "stop": (EXITED, -15), "kill -9": (LOST, None)}
    assert (status.phase, status.exit_code) == expected[end]


def test_what_was_given_up_ends_although_nobody_can_tell_it_to(executor, tmp_path):
    """As on a node that was cut off, whose attempt was forgotten when it comes back."""
    executor.start(assignment(tmp_path, *python(REFUSES)))
    wait_for_text(tmp_path / "log", "ready")
    everything = [supervisor_of(tmp_path), *(one.pid for one in left_of(tmp_path))]
    shutil.rmtree(folder_of(tmp_path))
    wait_until(lambda: not any(is_alive(pid) for pid in everything), "nothing runs")


def test_a_number_that_is_used_again_is_no_second_end_of_a_command(monkeypatch):
    gang = supervisor._Gang()
    gang.rank_of[5] = 0
    gang._handles.append(argparse.Namespace(returncode=None))
    told = iter([(5, 0), (5, 256), (0, 0)])
    monkeypatch.setattr(os, "waitpid", lambda *_: next(told))
    gang.reap()
    assert gang.ended == [(0, 0)]
    assert not gang.rank_of


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
        processes.send(found, signal.SIGSTOP)
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


# ── kill -9 ──


def test_a_supervisor_that_is_killed_takes_everything_with_it(executor, tmp_path):
    executor.start(assignment(tmp_path, *python(WITH_GRANDCHILD + REFUSES)))
    everything = pids(tmp_path / "pids", 2)
    wait_for_text(tmp_path / "log", "ready")
    os.kill(supervisor_of(tmp_path), signal.SIGKILL)
    status = wait_for_phase(executor, LOST, EXITED)
    assert status.phase == LOST
    assert status.exit_code is None
    assert not any(is_alive(pid) for pid in everything)
    executor.start(assignment(tmp_path, "touch", "ran"))
    assert status_of(executor).phase == LOST
    assert not (tmp_path / "ran").exists()


def test_commands_die_with_their_supervisor_though_nobody_looks(executor, tmp_path):
    executor.start(assignment(tmp_path, *python(REFUSES)))
    wait_for_text(tmp_path / "log", "ready")
    (command,) = left_of(tmp_path)
    os.kill(supervisor_of(tmp_path), signal.SIGKILL)
    wait_until(lambda: not is_alive(command.pid), "the command is gone")


def test_a_command_that_is_killed_from_outside_has_ended(executor, tmp_path):
    executor.start(assignment(tmp_path, *python(WITH_GRANDCHILD + WAITS)))
    command, grandchild = pids(tmp_path / "pids", 2)
    os.kill(command, signal.SIGKILL)
    assert wait_for_end(executor).exit_code == -9
    assert not is_alive(grandchild)


def test_a_supervisor_that_is_halted_is_killed_when_its_time_is_up(executor, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "SUPERVISOR_DELAY_S", 0.2)
    executor.start(assignment(tmp_path, *python(OBEYS)))
    wait_for_text(tmp_path / "log", "ready")
    os.kill(supervisor_of(tmp_path), signal.SIGSTOP)
    executor.stop(NAME, 0.1)
    assert wait_for_end(executor).phase == LOST
    assert not left_of(tmp_path)


def test_a_number_that_was_used_again_is_left_alone(tmp_path):
    stranger = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    try:
        found = processes.process(stranger.pid)
        assert not processes.send(found._replace(start_ticks=found.start_ticks - 1), signal.SIGKILL)
        # The same through the files of an attempt whose supervisor had this number before.
        executor = executor_in(tmp_path)
        folder_of(tmp_path).mkdir()
        begun = {"pid": stranger.pid, "start_ticks": found.start_ticks - 1}
        path = folder_of(tmp_path) / attempt_folder.BEGUN
        attempt_folder.write_json(path, {**begun, "boot": processes.boot()})
        executor.kill(NAME)
        begun["start_ticks"] += 1
        attempt_folder.write_json(path, {**begun, "boot": "an earlier one"})
        executor.kill(NAME)
        assert wait_for_end(executor).phase == LOST
        assert stranger.poll() is None
        assert processes.send(found, signal.SIGKILL)
        assert stranger.wait() == -signal.SIGKILL
        assert not processes.send(found, signal.SIGKILL)
    finally:
        stranger.kill()
        stranger.wait()


# ── names run once, whoever asks ──


def test_many_starts_run_once(executor, tmp_path):
    other = executor_in(tmp_path)
    once = assignment(tmp_path, *python("open('runs', 'a').write('x'); import time; time.sleep(1)"))
    for one in (executor, other, executor):
        one.start(once)
    folder = str(folder_of(tmp_path))
    by_hand = [
        subprocess.Popen([sys.executable, "-m", "hocket.service.executors.supervisor", folder])
        for _ in range(2)
    ]
    assert wait_for_end(other).exit_code == 0
    assert [one.wait() for one in by_hand] == [0, 0]
    executor.start(once)
    executor.poll()
    assert (tmp_path / "runs").read_text() == "x"
    other.close()


def test_a_new_executor_sees_what_an_old_one_started(executor, tmp_path):
    executor.start(assignment(tmp_path, *python(OBEYS)))
    wait_for_text(tmp_path / "log", "ready")
    executor.close()
    adopted = executor_in(tmp_path)
    assert wait_for_phase(adopted, RUNNING)
    adopted.stop(NAME, 20.0)
    assert wait_for_end(adopted).exit_code == 4
    assert wait_for_end(executor_in(tmp_path)).exit_code == 4


def test_a_start_that_a_daemon_did_not_survive_is_carried_on(executor, tmp_path):
    folder_of(tmp_path).mkdir()
    attempt_folder.write_assignment(folder_of(tmp_path), assignment(tmp_path, "touch", "ran"))
    assert status_of(executor).phase == STARTING
    assert wait_for_end(executor).exit_code == 0
    assert (tmp_path / "ran").exists()


def test_a_supervisor_that_cannot_start_is_told(executor, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    executor.start(assignment(tmp_path, "touch", "ran"))
    status = wait_for_end(executor)
    assert (status.phase, status.exit_code) == (EXITED, 126)
    monkeypatch.setattr(sys, "executable", "/no/such/program")
    other = AttemptName(8, 1)
    with pytest.raises(RunError, match="No such file"):
        executor.start(assignment(tmp_path, "touch", "ran", name=other))
    assert wait_for_end(executor, other).exit_code == 126
    assert not (tmp_path / "ran").exists()


def test_a_forgotten_attempt_is_not_told_and_its_name_stays_refused(executor, tmp_path):
    executor.start(assignment(tmp_path, "true"))
    executor.forget(NAME)
    wait_for_end(executor)
    executor.forget(NAME)
    assert not executor.poll().attempts
    assert not folder_of(tmp_path).exists()
    executor.start(assignment(tmp_path, "touch", "ran"))
    assert status_of(executor).exit_code == 126
    executor.start(assignment(tmp_path, "true", name=NAME._replace(attempt=NAME.attempt + 1)))
    assert wait_for_end(executor, NAME._replace(attempt=NAME.attempt + 1)).exit_code == 0
    assert not (tmp_path / "ran").exists()


def test_what_was_set_aside_is_ended_and_disturbs_no_later_attempt(executor, tmp_path):
    """Also where a supervisor was killed before, and only what it ran is left."""
    orphaned = AttemptName(8, 1)
    executor.start(assignment(tmp_path, *python(OBEYS)))
    executor.start(
        assignment(
            tmp_path,
            *python(WITH_GRANDCHILD + REFUSES),
            name=orphaned,
            log_file=tmp_path / "orphaned",
        )
    )
    wait_for_text(tmp_path / "log", "ready")
    wait_for_text(tmp_path / "orphaned", "ready")
    old = [one.pid for name in (NAME, orphaned) for one in left_of(tmp_path, name)]
    assert len(old) == 3
    os.kill(supervisor_of(tmp_path, orphaned), signal.SIGKILL)
    executor.close()
    (tmp_path / "damaged-1").mkdir()
    os.rename(tmp_path / "attempts", tmp_path / "damaged-1" / "attempts")

    fresh = executor_in(tmp_path)
    fresh.start(assignment(tmp_path, *python(OBEYS), log_file=tmp_path / "fresh"))
    wait_for_text(tmp_path / "fresh", "ready")
    local.end_set_aside(tmp_path)
    assert not any(is_alive(pid) for pid in old)
    assert status_of(fresh).phase == RUNNING
    fresh.kill(NAME)
    assert wait_for_end(fresh).phase == EXITED
    fresh.close()


@pytest.mark.parametrize("file", [attempt_folder.RESULT, attempt_folder.STOP, attempt_folder.BEGUN])
def test_damaged_files_end_in_a_reason(executor, tmp_path, file):
    executor.start(assignment(tmp_path, "true"))
    wait_for_end(executor)
    (folder_of(tmp_path) / attempt_folder.RESULT).unlink()
    (folder_of(tmp_path) / file).write_text("{ha")
    assert wait_for_end(executor).phase == LOST
    executor.forget(NAME)
    assert not executor.poll().attempts


def test_an_attempt_that_runs_is_never_told_to_have_ended(executor, tmp_path):
    """Not when a later one was forgotten, nor when its start is repeated without descriptors."""
    later = NAME._replace(attempt=NAME.attempt + 1)
    executor.start(assignment(tmp_path, *python(OBEYS)))
    wait_for_text(tmp_path / "log", "ready")
    executor.kill(later)
    wait_for_end(executor, later)
    executor.forget(later)
    adopted = executor_in(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with contextlib.suppress(RunError):
            adopted.start(assignment(tmp_path, *python(OBEYS)))
        told = None
        with contextlib.suppress(RunError):
            told = status_of(adopted)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert told is None or told.phase == RUNNING
    adopted.start(assignment(tmp_path, *python(OBEYS)))
    assert status_of(adopted).phase == RUNNING
    adopted.close()


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
    assert (found["HOCKET_DEVICES"], found["HOCKET_KIND"]) == ("v100-0,v100-1", "v100")
    assert found["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.parametrize(
    ("kind", "devices", "given", "visible"),
    [
        ("a100-80g", ("gpu3", "gpu10"), {}, "3,10"),
        ("cpu", ("cpu0",), {}, None),
        ("mi300", ("x0",), {}, None),
        ("tpu-v4", ("x0",), {}, None),
        ("h100", ("left", "x1"), {}, None),
        ("h100", ("x1",), {"CUDA_VISIBLE_DEVICES": "5"}, "5"),
    ],
)
def test_cuda_devices_are_named_by_their_index(tmp_path, kind, devices, given, visible):
    work = assignment(tmp_path, "true", kind=kind, devices=devices, environment=given)
    assert local._with_cuda(work).environment.get("CUDA_VISIBLE_DEVICES") == visible


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
