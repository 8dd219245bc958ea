"""Workers, the web service and what strangers send: on parts that need no training."""

import json
import os
import signal
import threading

import numpy as np
import pytest
from classes.small import NUM_CLASSES, SHAPE, small_folder, whole_scores
from fastapi.testclient import TestClient
from patience import wait_until

import hocket.cli
from hocket.base.errors import RunError, UsageError
from hocket.classes.serving.app import answer_body, make_app, max_body_bytes
from hocket.classes.serving.dry_run import forecast_by_dry_run, forecast_of
from hocket.classes.serving.front_end import (
    FrontEnd,
    ServeOptions,
    answer_from,
    apart,
    cores_for,
    is_enough,
    siblings_of,
)
from hocket.classes.serving.link import WorkerLink

TOKEN = "a-token-of-many-characters"
RAW = "application/octet-stream"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_folder(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def front_end(folder):
    with FrontEnd(folder, ServeOptions(deadline_s=60)) as front_end:
        yield front_end


@pytest.fixture(scope="module")
def client(front_end):
    app = make_app(front_end, TOKEN)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        client.headers["authorization"] = f"Bearer {TOKEN}"
        yield client


def inputs(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, *SHAPE)).astype(np.float32)


def test_answers_are_those_of_the_whole_net(front_end):
    for each in inputs(20):
        answer = front_end.predict(each, 60)
        assert answer.missing == ()
        assert answer.scores == pytest.approx(whole_scores(each)[0], rel=1e-4, abs=1e-4)
        assert answer.probabilities.sum() == pytest.approx(1)


def test_the_same_input_has_the_same_answer_in_every_pass(folder):
    given = inputs(40, seed=4)
    # Late means later than any pause of a busy machine.
    with FrontEnd(folder, ServeOptions(deadline_s=60, patience_s=60)) as front_end:
        passes = [[front_end.predict(each) for each in given] for _ in range(10)]
    assert all(answer.came == 3 for each in passes for answer in each)
    first = [answer.scores.tobytes() for answer in passes[0]]
    for each in passes[1:]:
        assert [answer.scores.tobytes() for answer in each] == first


def test_a_late_worker_is_waited_for_no_longer_than_patience(folder):
    with FrontEnd(folder, ServeOptions(deadline_s=60, restarts=False)) as front_end:
        front_end.predict(inputs(1)[0])
        os.kill(front_end.process_ids[1], signal.SIGSTOP)
        try:
            answer = front_end.predict(inputs(1)[0])
        finally:
            os.kill(front_end.process_ids[1], signal.SIGCONT)
        assert answer.came == 2
        assert answer.missing == ()


def test_answers_are_enough_when_every_group_has_the_copies_that_can_come(folder):
    # Part k holds groups k and k + 1 of three, so that each group has two copies.
    table, came = folder.table, np.zeros((1, 5))
    assert [set(groups) for groups in table.held] == [{0, 1}, {1, 2}, {2, 0}]
    everyone = {0, 1, 2}
    assert is_enough(table, 1, [came, came, None], everyone)
    assert not is_enough(table, 1, [came, None, None], everyone)
    assert not is_enough(table, 2, [came, came, None], everyone)
    assert is_enough(table, 2, [came, came, None], {0, 1})
    # What has come counts, also from a worker that is gone since.
    assert not is_enough(table, 2, [came, None, came], {1})
    assert is_enough(table, 1, [None, None, None], set())


def test_many_threads_get_each_their_own_answer(front_end):
    given = inputs(40, seed=1)
    wrong = []

    def ask(mine):
        for index in mine:
            found = front_end.predict(given[index], 60).label
            if found != whole_scores(given[index])[0].argmax():
                wrong.append(index)

    threads = [threading.Thread(target=ask, args=(range(k, 40, 4),)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_any_worker_may_be_killed_in_mid_request_without_a_lost_answer(folder):
    given = inputs(4, seed=2)
    with FrontEnd(folder, ServeOptions(deadline_s=60)) as front_end:
        for victim in range(3):
            wait_until(lambda: _restarts(front_end) == victim and front_end.num_alive == 3)  # noqa: B023
            process = front_end.process_ids[victim]
            # Stopped, it holds its request in mid-flight; then it is killed.
            os.kill(process, signal.SIGSTOP)
            first = front_end.predict(given[0])
            os.kill(process, signal.SIGKILL)
            answers = [first, *(front_end.predict(each) for each in given[1:])]
            for each, answer in zip(given, answers, strict=True):
                assert answer.missing == ()
                assert answer.label == whole_scores(each)[0].argmax()
        wait_until(lambda: _restarts(front_end) == 3 and front_end.num_alive == 3)
        metrics = front_end.metrics()
        assert [worker.deaths for worker in metrics.workers] == [1, 1, 1]
        assert [worker.restarts for worker in metrics.workers] == [1, 1, 1]
        process_ids = front_end.process_ids
    assert not any(_is_there(each) for each in process_ids)


def test_requests_are_answered_while_a_worker_is_being_started(front_end, monkeypatch):
    start_again = WorkerLink.start_again
    begun, may_start = threading.Event(), threading.Event()

    def slowly(link):
        begun.set()
        assert may_start.wait(60)
        return start_again(link)

    monkeypatch.setattr(WorkerLink, "start_again", slowly)
    os.kill(front_end.process_ids[0], signal.SIGKILL)
    assert begun.wait(60)
    given = inputs(1)[0]
    assert front_end.predict(given, 60).label == whole_scores(given)[0].argmax()
    assert front_end.num_alive == 2
    may_start.set()
    wait_until(lambda: front_end.num_alive == 3)


def test_without_copies_the_classes_of_a_dead_worker_are_named(tmp_path):
    folder = small_folder(tmp_path, redundancy=1)
    with FrontEnd(folder, ServeOptions(deadline_s=60, restarts=False)) as front_end:
        os.kill(front_end.process_ids[1], signal.SIGKILL)
        wait_until(lambda: front_end.num_alive == 2)
        answer = front_end.predict(inputs(1)[0])
        assert answer.missing == folder.table.parts[1].classes
        assert answer.label not in answer.missing
    with pytest.raises(RunError, match="closed"):
        front_end.predict(inputs(1)[0])


def test_a_deadline_gives_what_has_come(tmp_path):
    folder = small_folder(tmp_path, redundancy=1)
    with FrontEnd(folder, ServeOptions(deadline_s=60)) as front_end:
        process = front_end.process_ids[0]
        os.kill(process, signal.SIGSTOP)
        answers = [front_end.predict(each, 0.5) for each in inputs(2)]
        os.kill(process, signal.SIGCONT)
        assert all(set(answer.missing) >= {0, 1} for answer in answers)
        wait_until(lambda: front_end.metrics().workers[0].late == 2)
        assert front_end.predict(inputs(1)[0]).missing == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((4, 4)), "has the shape"),
        (np.full(SHAPE, np.nan), "NaN or infinity"),
        (np.full(SHAPE, 1e300), "beyond float32"),
        (np.full(SHAPE, "a"), "has the type"),
        (np.zeros((2, *SHAPE)), "has the shape"),
    ],
)
def test_wrong_inputs_are_refused_before_any_worker_sees_them(front_end, given, message):
    with pytest.raises(UsageError, match=message):
        front_end.predict(given)


def test_the_web_service_answers_json_and_raw(client):
    given = inputs(1, seed=3)[0]
    expected = whole_scores(given)[0].argmax()
    told = client.post("/v1/predict?deadline_s=60", json={"input": given.tolist()}).json()
    raw = client.post("/v1/predict?top=1&deadline_s=60", content=given.tobytes(),
                      headers={"content-type": RAW}).json()  # fmt: skip
    assert told["index"] == raw["index"] == expected
    assert told["label"] == f"class {expected}"
    assert len(told["classes"]) == 5
    assert len(raw["classes"]) == 1
    model = client.get("/v1/model").json()
    assert model["input_shape"] == list(SHAPE)
    assert len(model["classes"]) == NUM_CLASSES
    assert len(client.get("/v1/metrics").json()["workers"]) == 3
    assert client.get("/healthz", headers={"authorization": ""}).json()["workers"] == 3
    assert "/v1/predict" in client.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b'{"input": NaN}', "application/json", 400),
        (b'{"input": [[[1, 2], [3]]]}', "application/json", 422),
        (b'{"input": "image"}', "application/json", 422),
        (b'{"input": [1e400]}', "application/json", 422),
        (b'{"input": [[["1", "2"]]]}', "application/json", 422),
        (b'{"input": [[[true, false]]]}', "application/json", 422),
        (b'{"input": [[[1, null]]]}', "application/json", 422),
        (np.full(SHAPE, 3e38, np.float32).tobytes(), RAW, 422),
        (b'{"input": [], "path": "/etc"}', "application/json", 422),
        (b"[" * 5000, "application/json", 400),
        (np.full(SHAPE, np.inf, np.float32).tobytes(), RAW, 422),
        (b"short", RAW, 422),
        (b"", "text/plain", 415),
        (b"x" * 70_000, RAW, 413),
    ],
)
def test_hostile_requests_get_a_clear_error_and_kill_no_worker(
    client, front_end, content, kind, status
):
    answer = client.post("/v1/predict", content=content, headers={"content-type": kind})
    assert answer.status_code == status
    assert answer.json()["detail"]
    assert front_end.num_alive == 3
    assert max_body_bytes(front_end.table) == 65_536


def test_scores_that_are_no_numbers_never_win(front_end):
    answer = front_end.predict(np.full(SHAPE, 3e38, np.float32), 60)
    assert answer.label == -1
    assert answer.senseless
    assert answer.missing == tuple(range(NUM_CLASSES))


def test_the_label_is_the_first_class_though_probabilities_look_equal(front_end):
    combiner, names = front_end.table.combiner(), front_end.table.class_names
    outputs = [np.full(1 + len(each), 0.0) for each in combiner.classes]
    outputs[1][-1] = 1e-40
    answer = answer_from(combiner, outputs, 0, 0)
    body = answer_body(answer, names, 3)
    assert len(set(answer.probabilities)) == 1
    assert body.classes[0].name == body.label == names[combiner.classes[1][-1]]


@pytest.mark.parametrize(
    ("alive", "told"), [(3, "in time"), (1, "2 of 3 workers are dead"), (0, "3 of 3 workers")]
)
def test_when_nobody_answers_it_is_said_who_is_dead_and_what_comes_next(
    front_end, monkeypatch, alive, told
):
    nothing = answer_from(front_end.table.combiner(), [None] * 3, 0, 0)
    monkeypatch.setattr(FrontEnd, "num_alive", alive)
    monkeypatch.setattr(FrontEnd, "predict", lambda self, inputs, deadline_s: nothing)
    with TestClient(make_app(front_end, TOKEN), base_url="http://127.0.0.1") as client:
        client.headers["authorization"] = f"Bearer {TOKEN}"
        raw = inputs(1)[0].tobytes()
        answer = client.post("/v1/predict", content=raw, headers={"content-type": RAW})
    assert answer.status_code == 503
    assert told in answer.json()["detail"]
    assert ("started again" in answer.json()["hint"]) == (alive < 3)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": ""}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"host": "evil.example"}, 421),
        ({"origin": "http://evil.example"}, 403),
        ([("origin", "http://127.0.0.1"), ("origin", "http://evil.example")], 400),
        ({"transfer-encoding": "chunked", "content-length": "3"}, 400),
    ],
)
def test_only_the_token_on_a_loopback_name_opens_the_service(client, headers, status):
    assert client.get("/v1/model", headers=headers).status_code == status


def test_the_prediction_names_its_pieces(folder):
    forecast = forecast_by_dry_run(folder, ServeOptions(quorum=2))
    assert len(forecast.part_s) == 3
    assert forecast.answer_s > max(forecast.part_s)
    assert json.dumps(forecast.to_data())


def test_a_prediction_waits_for_nobody_whom_an_answer_does_without(folder):
    with FrontEnd(folder, ServeOptions(deadline_s=60, restarts=False)) as front_end:
        stopped = front_end.process_ids[1]
        os.kill(stopped, signal.SIGSTOP)
        forecast = forecast_of(front_end)
        os.kill(stopped, signal.SIGCONT)
        # It never answered in time, so that its part is as it was measured where it was made.
        assert forecast.part_s[1] == folder.table.parts[1].latency_s
        assert forecast.answer_s > min(forecast.part_s[0], forecast.part_s[2])
        front_end.predict(inputs(1)[0])
        assert front_end.metrics().answers.count == 1
        assert front_end.metrics().workers[1].late <= 1


def test_workers_get_physical_cores_of_their_own_first():
    def pairs(core):
        return (core // 2 * 2, core // 2 * 2 + 1)

    def far(core):
        return (core % 4, core % 4 + 4)

    assert apart({0, 1, 2, 3, 5}, pairs) == [0, 2, 5, 1, 3]
    assert apart(set(range(8)), far) == list(range(8))
    assert all(core in siblings_of(core) for core in os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("part_s", "expected"),
    [([1.0, 1.0], [3, 5]), ([1.0, 4.0, 2.0], [5, 3, 5]), ([0.0, 0.0, 0.0], [3, 5, 3])],
)
def test_long_parts_go_to_the_least_loaded_cores(part_s, expected):
    assert cores_for(part_s, (3, 5)) == expected


def test_a_dry_run_is_not_counted(folder):
    with FrontEnd(folder) as front_end:
        took_s, replies = front_end.dry_run(inputs(1)[0])
        assert all(0 < each.spent_ns < each.after_ns < took_s * 1e9 for each in replies.values())
        assert all(worker.answered == 0 for worker in front_end.metrics().workers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--deadline", "0s"], "--deadline 0s is no time"),
        (["--deadline", "61s"], "--deadline 61s is no time"),
        (["--quorum", "3"], "each class is on 2 workers"),
    ],
)
def test_options_that_cannot_hold_are_refused(folder, capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        hocket.cli.main(["serve-classes", str(folder.path), *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def _restarts(front_end):
    return sum(worker.restarts for worker in front_end.metrics().workers)


def _is_there(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True
