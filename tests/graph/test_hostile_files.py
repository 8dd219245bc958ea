"""Files that nobody should have to trust: refused in time, in little memory, with path and hint."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from graph.test_graph_formats import PIPEDREAM, dnn_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.base.errors import InputFileError
from hocket.base.jsonfile import dump_json
from hocket.graph import generate, graph_to_dict, read_graph, verify_graph

MB = 10**6
VALID = dump_json(graph_to_dict(generate("transformer", 43)))
DNN = json.dumps(dnn_file()).encode()
FORMATS = {"columns": VALID, "dnn": DNN, "pipedream": PIPEDREAM.encode()}


def refused(path: Path, *, within_s: float = 2.0) -> InputFileError:
    """The error of reading ``path``, which must come in time, with path and hint."""
    start_s = time.process_time()
    with pytest.raises(InputFileError) as caught:
        read_graph(path)
    assert time.process_time() - start_s < within_s
    error = caught.value
    assert error.exit_code == 3
    assert error.where == str(path)
    assert error.hint
    assert len(str(error)) < 1000
    assert str(error).replace("\n", " ").isprintable()
    return error


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "hostile.json"
    path.write_bytes(data)
    return path


# ── files that are no graph at all ───────────────────────────────────────────────────────────────


START = b'{"schema": "hocket.graph/1", "name": '
NONSENSE = {
    "random bytes": lambda: os.urandom(MB) * 100,
    "spaces": lambda: b" " * (100 * MB),
    "brackets": lambda: b"[" * (100 * MB),
    "braces": lambda: b"{" * (100 * MB),
    "pairs": lambda: b"[" + b"[]," * (33 * MB),
    "digits": lambda: b"1234567890" * (10 * MB),
    "zeros": lambda: bytes(100 * MB),
    "lines": lambda: b"\n" * (100 * MB),
    "a number": lambda: START + b"1234567890" * (10 * MB),
    "a fraction": lambda: START + b"0." + b"1234567890" * (10 * MB) + b"}",
    "a text": lambda: START + b'"' + b"x" * (100 * MB),
    "a name": lambda: START + b'"' + b"x" * (100 * MB) + b'"}',
    "a key": lambda: b'{"' + b"x" * (100 * MB) + b'": 1}',
    "commas": lambda: START + b"[" + b"0," * (50 * MB),
    "one layer": lambda: b"node1 -- x -- forward_compute_time=" + b"1234567890" * (10 * MB),
    "layers": lambda: b"node1 -- x -- forward_compute_time=1\n" * (2 * MB),
    "dashes": lambda: b"forward_compute_time=" + b" -- " * (25 * MB),
}


def peak_bytes_of_refusing(path: Path) -> int:
    tracemalloc.start()
    try:
        refused(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", NONSENSE)
def test_read_graph_refuses_a_hundred_megabytes_of_nonsense(tmp_path, kind):
    path = written(tmp_path, NONSENSE[kind]())
    peak_bytes = peak_bytes_of_refusing(path)
    path.unlink()
    # The file itself, once as bytes and once as text, and nothing much besides.
    assert peak_bytes < 450 * MB


@pytest.mark.parametrize("start", [b"", b'{"schema": "hocket.graph/1", "name": "', b'{"a": ['])
def test_read_graph_refuses_a_gzip_bomb_before_it_is_unpacked(tmp_path, start):
    four_gigabytes = gzip.compress((b" " if start else b"\0") * (8 * MB)) * 500
    path = written(tmp_path, gzip.compress(start, mtime=0) * bool(start) + four_gigabytes)
    assert path.stat().st_size < 5 * MB
    assert peak_bytes_of_refusing(path) < (450 * MB if start else 10 * MB)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b" \n ", "is empty"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (gzip.compress(VALID, mtime=0)[:-100], "damaged"),
        (gzip.compress(VALID, mtime=0)[:200], "damaged"),
        (gzip.compress(VALID, mtime=0)[:-8] + b"00000000", "damaged"),
        (b"\x1f\x8b", "damaged"),
        (b"\x1f\x8b" + b"x" * 1000, "damaged"),
        (gzip.compress(VALID, mtime=0) + b"garbage", "damaged"),
        (VALID[:-50], "not valid JSON"),
        (VALID + b"{}", "not valid JSON"),
        (VALID.replace(b"blocks", b"bl\xffcks"), "not UTF-8"),
        (b"\xef\xbb\xbf" + VALID, "does not start like"),
        (VALID.decode().encode("utf-16"), "does not start like"),
        (b"\x80\x04\x95 pickled", "does not start like"),
        (b"<html>", "does not start like"),
        (b'{"a":' * 100_000, "nested deeper"),
        (b'{"schema":"hocket.graph/1","meta":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
        (VALID[:-2] + b',"schema":"hocket.graph/1"}', "'schema' occurs twice"),
        (VALID.replace(b'"kinds"', b'"meta":{"a":1,"a":2},"kinds"', 1), "occurs twice"),
        (VALID.replace(b'"flops":[0.0', b'"flops":[NaN', 1), "NaN is not a JSON number"),
        (VALID.replace(b'"flops":[0.0', b'"flops":[-Infinity', 1), "Infinity is not a JSON"),
        (VALID.replace(b'"flops":[0.0', b'"flops":[1e999', 1), "ops.flops[0] is inf"),
        (VALID.replace(b'"flops":[0.0', b'"flops":[-1', 1), "ops.flops[0] is -1"),
        (VALID.replace(b'"ptr":[0,', b'"ptr":[' + b"9" * 4000 + b",", 1), "reads.ptr[0] is 99"),
        (b"node1 -- a\xff -- forward_compute_time=1", "not UTF-8"),
    ],
)  # fmt: skip
def test_read_graph_refuses_damaged_files(tmp_path, data, message):
    assert message in refused(written(tmp_path, data)).message


def test_read_graph_refuses_what_is_no_file(tmp_path):
    assert "no such file" in refused(tmp_path / "missing").message
    assert "is a folder" in refused(tmp_path).message
    assert refused(Path("/dev/zero")).message
    for impossible in ("x" * 5000, "nul\0"):
        with pytest.raises(InputFileError, match="cannot be read"):
            read_graph(impossible)


def test_read_graph_refuses_a_file_without_permission(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    path = written(tmp_path, VALID)
    path.chmod(0)
    assert "Permission denied" in refused(path).message


# ── graphs that lie ──────────────────────────────────────────────────────────────────────────────


def test_read_graph_refuses_a_cycle_in_every_format(tmp_path):
    data = json.loads(VALID)
    ptr, made_last = data["reads"]["ptr"], len(data["tensors"]["name"]) - 1
    data["reads"]["tensor"][ptr[1] - 1] = made_last
    assert "before it is made" in refused(written(tmp_path, json.dumps(data).encode())).message
    edges = [{"sourceId": 3, "destId": 5, "cost": 0}, {"sourceId": 5, "destId": 3, "cost": 0}]
    assert "cycle" in refused(written(tmp_path, json.dumps(dnn_file(edges=edges)).encode())).message
    text = PIPEDREAM + "\n\tnode3 -- node1"
    assert "cycle" in refused(written(tmp_path, text.encode())).message


@pytest.mark.parametrize(
    "name",
    ["nul\0", "\x1b[31mred", "line\nbreak", "\u202eright to left", "\ud800", "", "n" * 10**5],
)
def test_read_graph_refuses_names_that_cannot_be_shown(tmp_path, name):
    data = json.loads(VALID)
    data["ops"]["name"][3] = name
    error = refused(written(tmp_path, json.dumps(data).encode()))
    assert "name of op 3" in error.message


@pytest.mark.parametrize(
    "name",
    ["<script>alert(1)</script>", "../../etc/passwd", "'; DROP TABLE ops", "{0.__class__}", "ключ"],
)
def test_read_graph_takes_any_printable_name_as_mere_text(tmp_path, name):
    data = json.loads(VALID)
    data["ops"]["name"][3] = data["tensors"]["name"][0] = name
    graph = read_graph(written(tmp_path, json.dumps(data).encode()))
    assert graph.op_names[3] == graph.tensor_names[0] == name


def test_read_graph_refuses_names_that_stand_twice(tmp_path):
    data = json.loads(VALID)
    data["ops"]["name"][3] = data["ops"]["name"][2]
    message = refused(written(tmp_path, json.dumps(data).encode())).message
    assert message == "two ops have the name 'attn.qkv'".replace("attn", "blocks.0.attn")


def test_read_graph_stays_quick_on_a_large_file_with_one_mistake(tmp_path):
    nodes = [{"id": i, "supportedOnFpga": 1, "cpuLatency": 1, "fpgaLatency": 1,
              "isBackwardNode": 0, "size": 1} for i in range(20_000)]  # fmt: skip
    edges = [{"sourceId": 0, "destId": i, "cost": 1} for i in range(20_000)]
    file = dnn_file(nodes=nodes, edges=edges)
    assert "cycle" in refused(written(tmp_path, json.dumps(file).encode())).message
    line = PIPEDREAM.split("\n")[1] + "\n"
    layers = "".join(line.replace("node1", f"node{i}") for i in range(20_000))
    text = layers + "\n\tnode1 -- node20001"
    assert "unknown node" in refused(written(tmp_path, text.encode())).message


def test_read_graph_refuses_endless_ids_shortly(tmp_path):
    text = PIPEDREAM.replace("node", "n" * 20_000)
    for change in (text + "\n\tx -- y", text + "\n\t" + "x" * 50_000 + " -- y"):
        assert len(str(refused(written(tmp_path, change.encode())))) < 1500


# ── fuzzing ──────────────────────────────────────────────────────────────────────────────────────

JUNK = (
    st.none()
    | st.booleans()
    | st.integers(-3, 60)
    | st.sampled_from([10**30, -(10**30), 2**31, 2**63, 1e308, -0.0, 0.5])
    | st.text(max_size=5)
    | st.lists(st.integers(-2, 3), max_size=3)
    | st.dictionaries(st.sampled_from(["a", "name", "ptr"]), st.integers(), max_size=2)
)


def places(value: object) -> list[tuple[object, object]]:
    """Every (container, key) inside a parsed JSON value."""
    found: list[tuple[object, object]] = []
    waiting = [value]
    while waiting:
        container = waiting.pop()
        keys = container if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], (dict, list)):
                waiting.append(container[key])
    return found


def assert_read_or_refused(path: Path) -> None:
    error = None
    try:
        graph = read_graph(path)
    except InputFileError as caught:
        error = caught
    if error is not None:
        assert error.where == str(path)
        assert error.hint
        return
    verify_graph(graph)
    assert len(graph.edges[0]) <= len(graph.reads) == len(graph.users)


FUZZ = settings(
    derandomize=True,
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@FUZZ
@given(st.sampled_from(["columns", "dnn"]), st.data())
def test_read_graph_survives_any_change_of_a_value(tmp_path, kind, data):
    value = json.loads(FORMATS[kind])
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places(value)))
        action = data.draw(st.sampled_from(["set", "set", "drop", "add"]))
        if action == "set":
            container[key] = data.draw(JUNK)
        elif action == "drop":
            del container[key]
        elif isinstance(container, dict):
            container[data.draw(st.text(max_size=8))] = data.draw(JUNK)
        else:
            container.insert(key, data.draw(JUNK))
        if not value:
            break
    assert_read_or_refused(written(tmp_path, json.dumps(value).encode()))


@FUZZ
@given(st.sampled_from(sorted(FORMATS)), st.booleans(), st.data())
def test_read_graph_survives_any_change_of_bytes(tmp_path, kind, packed, data):
    content = bytearray(gzip.compress(FORMATS[kind], mtime=0) if packed else FORMATS[kind])
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        stop = min(len(content), start + data.draw(st.integers(0, 8)))
        content[start:stop] = data.draw(st.binary(max_size=8))
    assert_read_or_refused(written(tmp_path, bytes(content)))


# ── reading runs nothing and opens nothing else ──────────────────────────────────────────────────

AUDITED = """
import sys
from hocket.graph import read_graph
warm, path = sys.argv[1:]
read_graph(warm)
loaded, seen, active = set(sys.modules), [], True
def hook(event, args):
    if event == "open" and isinstance(args[0], int):
        return  # a descriptor of what is open already
    if active and event.split(".")[0] in (
        "open", "import", "exec", "compile", "subprocess", "os", "socket", "ctypes", "pickle",
    ):
        seen.append((event, str(args[0]) if args else ""))
sys.addaudithook(hook)
try:
    read_graph(path)
except Exception as error:
    print(type(error).__name__)
active = False
print(sorted(set(seen)), sorted(set(sys.modules) - loaded))
"""


@pytest.mark.parametrize("kind", sorted(FORMATS))
@pytest.mark.parametrize("packed", [False, True])
def test_read_graph_opens_its_file_and_does_nothing_else(tmp_path, kind, packed):
    for name in ("warm", "audited"):
        data = gzip.compress(FORMATS[kind], mtime=0) if packed else FORMATS[kind]
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", AUDITED, str(tmp_path / "warm"), str(tmp_path / "audited")]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.stdout == f"{[('open', str(tmp_path / 'audited'))]} []\n", out.stderr


def test_read_graph_of_a_bad_file_does_nothing_else_either(tmp_path):
    (tmp_path / "warm").write_bytes(VALID)
    (tmp_path / "bad").write_bytes(VALID.replace(b'"kinds"', b'"__import__"', 1))
    command = [sys.executable, "-c", AUDITED, str(tmp_path / "warm"), str(tmp_path / "bad")]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.stdout == f"InputFileError\n{[('open', str(tmp_path / 'bad'))]} []\n", out.stderr
