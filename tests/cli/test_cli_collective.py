"""``hocket collective`` as it is typed."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from hocket.base.errors import HocketError
from hocket.cli.root import root

MATRIX = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV1\tNV1\tNV2\t0-19
GPU1\tNV1\t X \tNV2\tNV1\t0-19
GPU2\tNV1\tNV2\t X \tNV2\t0-19
GPU3\tNV2\tNV1\tNV2\t X \t0-19
"""
NCCL = """\
<system version="1"><cpu numaid="0" vendor="GenuineIntel" modelid="85">
<pci busid="0000:05:00.0" link_speed="8.0 GT/s PCIe" link_width="16">
<pci busid="0000:06:00.0" link_speed="8.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="70">
<nvlink target="0000:07:00.0" count="2" tclass="0x030200"/></gpu></pci>
<pci busid="0000:07:00.0" link_speed="8.0 GT/s PCIe" link_width="16"><gpu dev="1" sm="70">
<nvlink target="0000:06:00.0" count="2" tclass="0x030200"/></gpu></pci>
</pci></cpu></system>
"""


def run(*arguments, code=0):
    result = CliRunner().invoke(root, ["collective", *arguments])
    if code:
        assert isinstance(result.exception, HocketError | SystemExit), result.output
        return result.exception
    assert result.exception is None, result.exception
    return result.stdout


def run_json(*arguments):
    return json.loads(run(*arguments, "--json"))


def test_an_odd_allocation_is_planned_to_its_bound_and_says_why():
    found = run_json("all-reduce", "--on", "dgx1-v100", "--gpus", "0,1,2,4", "--size", "64MiB")
    assert found["rate_bps"] == found["bound_bps"] == 50e9
    assert found["gap"] == 0
    assert len(found["trees"]) == found["num_trees"] <= 6
    assert found["certificate"]["kind"] == "prices"
    assert found["plan_seconds"] >= 0
    names = [offer["algorithm"] for offer in found["offers"]]
    assert "chain" in names
    assert "ring over PCIe" in names
    text = run("allreduce", "--on", "dgx1-v100", "--gpus", "0,1,2,4")
    assert "✔  packed trees" in text
    assert "limited by" in text


def test_the_chosen_way_is_never_slower_than_another_at_any_size():
    for size in ("1KB", "64KB", "4MB", "256MB", "1GB"):
        found = run_json("allreduce", "--on", "dgx1-v100", "--gpus", "0-5", "--size", size)
        assert found["time_s"] == min(offer["time_s"] for offer in found["offers"])


def test_files_are_written_and_the_schedule_is_verified_again(tmp_path):
    plan, report = (str(tmp_path / name) for name in ("p.json", "r.html"))
    run("allgather", "--on", "dgx-a100-40g", "-o", plan, "--report", report)
    result = CliRunner().invoke(root, ["verify", plan])
    assert "legal" in result.stdout
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") >= 8
    assert "<script" not in page
    data = json.loads((tmp_path / "p.json").read_text())
    del data["sections"]["communication"]["trees"][0]["broadcast"][-1]
    (tmp_path / "p.json").write_text(json.dumps(data))
    broken = CliRunner().invoke(root, ["verify", plan])
    assert broken.exit_code == 6


def test_topologies_of_other_programs_are_read(tmp_path):
    matrix, dump = tmp_path / "m.txt", tmp_path / "t.xml"
    matrix.write_text(MATRIX)
    dump.write_text(NCCL)
    assert run_json("allreduce", "--on", str(matrix))["bound_bps"] == 75e9
    assert run_json("broadcast", "--on", str(dump))["bound_bps"] == 40e9


def test_blink_is_a_row_of_its_own():
    found = run_json("broadcast", "--on", "dgx1-v100", "--gpus", "0,1,2,3", "--blink")
    assert "blink" in [offer["algorithm"] for offer in found["offers"]]
    assert found["gap"] == 0.0


def test_the_bound_alone_goes_beyond_what_is_packed():
    found = run_json("allgather", "--on", "32xdgx-h100", "--bound")
    assert len(found["ranks"]) == 256
    assert found["certificate"]["kind"] == "cut"
    assert "--bound" in run("allgather", "--on", "32xdgx-h100", code=4).hint


def test_wrong_names_are_told_with_what_was_meant(tmp_path):
    assert "allreduce" in run("alreduce", "--on", "dgx1-v100", code=2).hint
    assert "0 to 7" in run("allreduce", "--on", "dgx1-v100", "--gpus", "0,9", code=2).hint
    assert "twice" in str(run("allreduce", "--on", "dgx1-v100", "--gpus", "0,0", code=2))
    assert "gpu0" in run("reduce", "--on", "dgx1-v100", "--root", "gpu00", code=2).hint
    broken = tmp_path / "t.xml"
    for text in ("<system><cpu", "<graph/>", "<!DOCTYPE x><system/>", "<system/>"):
        broken.write_text(text)
        assert run("allreduce", "--on", str(broken), code=3).exit_code == 3


def test_blinks_allocation_classes_gain_over_rings_as_published():
    found = run_json("allreduce", "--on", "dgx1-v100", "--classes", "--size", "500MiB")
    assert found["num_classes"] == 46
    # Blink reports up to 8x and 2x in the mean over NCCL 2; chains were added to NCCL later.
    assert found["over_rings"]["maximum"] == pytest.approx(13.3, abs=0.1)
    assert found["over_rings"]["geometric_mean"] == pytest.approx(3.2, abs=0.05)
    assert found["over_rings_and_chains"]["maximum"] == pytest.approx(2.0, abs=0.05)
    assert min(entry["speedup_over_rings"] for entry in found["classes"]) >= 1.0
    text = run("broadcast", "--on", "dgx1-p100", "--classes", "--size", "500MiB")
    assert "14 classes" in text
    assert "over NCCL's rings" in text


def test_bridges_that_repeat_a_bus_id_are_separate(tmp_path):
    port = '<pci busid="0000:c5:00.0" link_speed="8 GT/s" link_width="16">'
    gpus = "".join(
        f'{port}<pci busid="0000:d{n}:00.0" link_speed="8 GT/s" link_width="16">'
        f'<gpu dev="{n}" gcn="908" sm="120"/></pci></pci>'
        for n in range(3)
    )
    file = tmp_path / "topology.xml"
    switch = '<pci busid="0000:c3:00.0" link_speed="16 GT/s" link_width="16">'
    file.write_text(f'<system version="2"><cpu numaid="0">{switch}{gpus}</pci></cpu></system>')
    found = run_json("broadcast", "--on", str(file))
    # Each GPU has a port of 16 lanes of its own below the switch: 12 GB/s by NCCL's model.
    assert found["bound_bps"] == 12e9


@pytest.mark.parametrize("size", ["1B", "64B", "4KiB"])
def test_small_messages_are_timed_without_division_by_zero(size):
    # pytest turns numpy's warnings into errors.
    assert run_json("allreduce", "--on", "dgx1-v100", "--size", size)["offers"]
