"""Programs of collectives: ours and those of others run to the right result, wrong ones do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from export.collective_program import Slot, program_of_plan, run_program

from hocket.base.errors import CheckError, UsageError
from hocket.export.mscclpp import to_mscclpp
from hocket.export.nccl_graph import to_nccl_graph
from hocket.hardware.shorthand import cluster_from_text
from hocket.planners.communication.baselines import chain, one_hop, ring
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


def program_of(section, **limits):
    program = program_of_plan(json.loads(json.dumps(to_mscclpp(section, **limits))))
    return replace(program, root=section.ranks.index(section.root))  # plans do not name it


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_written_plans_deliver_everything(collective):
    for section in sections(collective):
        run_program(program_of(section))


def test_rounded_shares_still_deliver_everything():
    cluster = cluster_from_text("dgx1-v100")
    section = best_schedule(fabric_of(cluster, cluster.device_names), "allreduce", 0).section
    run_program(program_of(section))
    run_program(program_of(section, max_chunks=16))


def test_programs_that_lose_a_message_or_add_twice_are_caught():
    program = program_of(next(sections("allreduce")))
    block = program.blocks[0][0]
    with pytest.raises(CheckError):
        run_program(_with(program, 0, replace(block, steps=block.steps[:-1])))
    last = max(n for n, step in enumerate(block.steps) if step.targets)
    wrong = replace(block.steps[last], sources=(Slot("i", 0), Slot("i", 0)))
    steps = (*block.steps[:last], wrong, *block.steps[last + 1 :])
    with pytest.raises(CheckError, match="wrong chunk"):
        run_program(_with(program, 0, replace(block, steps=steps)))


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


@pytest.mark.skipif(not DATA.exists(), reason="shared data is not here")
def test_programs_of_others_run_to_the_right_result():
    files = sorted((DATA / "mscclpp_plans").glob("*.json"))
    programs = [program_of_plan(json.loads(path.read_text())) for path in files]
    assert programs
    assert [what_is_wrong_with(program) for program in programs] == [None] * len(programs)


def what_is_wrong_with(program):
    """What is said of a program that hangs or ends with a wrong result; None of a right one."""
    try:
        run_program(program)
    except CheckError as error:
        return error.message
    return None
