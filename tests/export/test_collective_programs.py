"""Programs of collectives: ours and those of others run to the right result, wrong ones do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hocket.base.errors import CheckError, InputFileError, UsageError
from hocket.export.compile_trees import program_of
from hocket.export.msccl import parse_msccl, to_msccl
from hocket.export.mscclpp import program_of_plan, to_mscclpp
from hocket.export.nccl_graph import to_nccl_graph
from hocket.export.program import Slot, run_program
from hocket.hardware.shorthand import cluster_from_text
from hocket.planners.communication.chains import chain, one_hop, ring
from hocket.planners.communication.fabric import fabric_of
from hocket.planners.communication.schedule import best_schedule

DATA = Path(__file__).parents[3] / "shared" / "data" / "communication"
COLLECTIVES = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")


def sections(collective):
    cluster = cluster_from_text("dgx1-v100")
    fabric = fabric_of(cluster, ("gpu0", "gpu1", "gpu2", "gpu3"))
    yield best_schedule(fabric, collective, 1).section
    for plain in (ring, chain, one_hop):
        found = plain(fabric, collective, 1)
        assert found is not None
        yield found


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_our_schedules_run_as_programs_and_survive_their_files(collective):
    for section in sections(collective):
        program, change = program_of(section)
        assert change == 0
        run_program(program)
        written = parse_msccl(to_msccl(program).encode(), "p.xml")
        assert written.blocks == program.blocks
        run_program(written)
        data = json.loads(json.dumps(to_mscclpp(section)))
        if collective not in ("broadcast", "reduce"):
            run_program(program_of_plan(data))


def test_rounded_shares_still_deliver_everything():
    cluster = cluster_from_text("dgx1-v100")
    section = best_schedule(fabric_of(cluster, cluster.device_names), "allreduce", 0).section
    program, change = program_of(section, max_chunks=16)
    assert 0 < change < 1
    run_program(program)


def test_programs_that_lose_a_message_or_add_twice_are_caught():
    program, _ = program_of(next(sections("allreduce")))
    rank = 0
    block = program.blocks[rank][0]
    short = replace(block, steps=block.steps[:-1])
    with pytest.raises(CheckError):
        run_program(_with(program, rank, short))
    receiver = next(n for n, b in enumerate(program.blocks[rank]) if b.receives_from)
    steps = program.blocks[rank][receiver].steps
    wrong = replace(steps[-1], targets=(Slot("i", 0),), sources=(Slot("i", 0), Slot("i", 0)))
    broken = replace(program.blocks[rank][receiver], steps=(*steps[:-1], wrong))
    with pytest.raises(CheckError, match="wrong chunk"):
        run_program(_with(program, rank, broken, receiver))


def _with(program, rank, block, index=0):
    mine = list(program.blocks[rank])
    mine[index] = block
    blocks = list(program.blocks)
    blocks[rank] = tuple(mine)
    return replace(program, blocks=tuple(blocks))


def test_rings_and_chains_alone_become_nccl_graphs():
    cluster = cluster_from_text("dgx1-v100")
    fabric = fabric_of(cluster, cluster.device_names)
    rings = to_nccl_graph(ring(fabric, "allreduce", 0), cluster)
    assert rings.count("<channel>") >= 6
    assert 'pattern="4"' in rings
    with pytest.raises(UsageError, match="forks"):
        to_nccl_graph(best_schedule(fabric, "allreduce", 0).section, cluster)


def test_files_that_are_no_programs_are_refused():
    for text in (
        "<algo",
        "<graph/>",
        "<algo/>",
        '<algo ngpus="1" coll="x"/>',
        "<!DOCTYPE a><algo/>",
    ):
        with pytest.raises(InputFileError):
            parse_msccl(text.encode(), "p.xml")


@pytest.mark.skipif(not DATA.exists(), reason="shared data is not here")
def test_programs_of_others_run_to_the_right_result():
    of_xml, of_json = (DATA / "msccl_xml").glob("*.xml"), (DATA / "mscclpp_plans").glob("*.json")
    programs = [parse_msccl(path.read_bytes(), path.name) for path in sorted(of_xml)]
    programs += [program_of_plan(json.loads(path.read_text())) for path in sorted(of_json)]
    assert programs
    assert [what_is_wrong_with(program) for program in programs] == [None] * len(programs)


def what_is_wrong_with(program):
    """What is said of a program that hangs or ends with a wrong result; None of a right one."""
    try:
        run_program(program)
    except CheckError as error:
        return error.message
    return None
