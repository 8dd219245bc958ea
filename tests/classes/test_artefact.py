import json

import pytest
from classes.small import small_folder

from hocket.base.errors import InputFileError
from hocket.classes.artefact import TABLE, read_folder
from hocket.classes.serving.dry_run import open_part
from hocket.classes.table import PartTable


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("parts")
    small_folder(path)
    return path


def test_a_folder_reads_as_it_was_written(path):
    folder = read_folder(path)
    assert PartTable.from_data(folder.table.to_data(), "") == folder.table
    assert folder.table.quorum == 1
    assert read_folder(str(folder.path)).table == folder.table
    assert len(folder.models) == 3


def test_a_changed_part_is_refused(path, tmp_path):
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with open(tmp_path / "part-1.onnx", "ab") as file:
        file.write(b"!")
    with pytest.raises(InputFileError, match=r"is not the file that table\.json was written with"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update(format="hocket-classes-9"),
            "format: input should be",
        ),
        (lambda t: t["parts"][0].update(onnx="../secret"), r"parts\.0\.onnx"),
        (lambda t: t["parts"][0].update(onnx="/etc/passwd"), r"parts\.0\.onnx"),
        (lambda t: t["parts"][0].update(classes=[0]), r"parts\[0\].classes are not those"),
        (lambda t: t["parts"][0]["calibration"].update(scale="big"), r"calibration\.scale"),
        (lambda t: t["groups"][0].append(0), "groups do not hold every class once"),
        (lambda t: t["held"].pop(), "held has 2 entries for 3 parts"),
        (lambda t: t.update(input_dtype="object"), "input_dtype: input should be"),
        (lambda t: t.update(input_shape=[1 << 24] * 6), "has too many numbers"),
        (lambda t: t.update(code="import os"), "unknown key 'code'"),
        (lambda t: t.update(redundancy=7), r"redundancy is 7 and groups are held \[2\] times"),
    ],
)
def test_a_wrong_table_is_told_by_its_place(path, tmp_path, change, message):
    table = json.loads((path / TABLE).read_bytes())
    change(table)
    (tmp_path / TABLE).write_text(json.dumps(table))
    with pytest.raises(InputFileError, match=message):
        read_folder(tmp_path)


def test_a_part_that_is_not_what_its_table_says_is_refused(path):
    folder = read_folder(path)
    open_part(folder.models[0], folder.table, 0)
    for other in (
        {"input_shape": (1, 4, 5)},
        {"input_dtype": "int64"},
        {"parts": (folder.table.parts[0].model_copy(update={"classes": (0,)}),)},
    ):
        with pytest.raises(InputFileError, match=r"part-0\.onnx: takes and gives"):
            open_part(folder.models[0], folder.table.model_copy(update=other), 0)


def test_an_empty_folder_says_what_is_expected(tmp_path):
    with pytest.raises(InputFileError, match=r"holds no table\.json"):
        read_folder(tmp_path)
