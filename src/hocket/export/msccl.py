"""MSCCL's algorithm XML: written from programs, read into them.

``<algo><gpu><tb send recv chan><step type srcbuf srcoff dstbuf dstoff cnt depid deps hasdep>``.
Types: s send, r receive, rcs receive-copy-send, rrs receive-reduce-send, rrc receive-reduce-copy,
rrcs all of it, cpy copy, re reduce, nop. A step may wait for one step of another thread block.
"""

from __future__ import annotations

from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from hocket.base.errors import InputFileError
from hocket.base.fields import shown
from hocket.export.program import BlockStep, CollectiveProgram, Slot, ThreadBlock

MAX_FILE_BYTES = 100_000_000
_COLLECTIVES = {"reduce_scatter": "reducescatter", "all_gather": "allgather"}
_TYPES = {
    # type: (receives, reads its source, writes its target, sends)
    "s": (False, True, False, True),
    "r": (True, False, True, False),
    "rcs": (True, False, True, True),
    "rrs": (True, True, False, True),
    "rrc": (True, True, True, False),
    "rrcs": (True, True, True, True),
    "cpy": (False, True, True, False),
    "re": (False, True, True, False),
    "nop": (False, False, False, False),
}


def parse_msccl(content: bytes, where: str) -> CollectiveProgram:
    """The program of an XML file; raises `InputFileError` that names it."""
    if len(content) > MAX_FILE_BYTES or b"<!DOCTYPE" in content or b"<!ENTITY" in content:
        raise InputFileError("is too large, or defines a document type", where=where)
    try:
        top = ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        raise InputFileError(f"is not XML: {error}", where=where) from None
    if top.tag != "algo":
        raise InputFileError(f"the top element is {shown(top.tag)}, not 'algo'", where=where)
    try:
        return _program(top)
    except (ValueError, KeyError) as error:
        raise InputFileError(f"is no MSCCL algorithm: {error}", where=where) from None


def _program(top: Element) -> CollectiveProgram:
    gpus = sorted(top.findall("gpu"), key=lambda gpu: int(gpu.attrib["id"]))
    if [int(gpu.attrib["id"]) for gpu in gpus] != list(range(int(top.attrib["ngpus"]))):
        raise ValueError("gpus are not numbered from 0 to ngpus - 1")
    coll = top.attrib["coll"]
    return CollectiveProgram(
        name=top.get("name", "algorithm"),
        collective=_COLLECTIVES.get(coll, coll),
        blocks=tuple(tuple(_blocks(gpu)) for gpu in gpus),
        num_input=tuple(int(gpu.attrib["i_chunks"]) for gpu in gpus),
        num_output=tuple(int(gpu.attrib["o_chunks"]) for gpu in gpus),
        num_scratch=tuple(int(gpu.attrib["s_chunks"]) for gpu in gpus),
        in_place=top.get("inplace") == "1",
        root=int(top.get("root", "0")),
    )


def _blocks(gpu: Element) -> list[ThreadBlock]:
    number = {int(tb.attrib["id"]): index for index, tb in enumerate(gpu.findall("tb"))}
    blocks = []
    for tb in gpu.findall("tb"):
        send, recv, channel = (int(tb.attrib[key]) for key in ("send", "recv", "chan"))
        steps = sorted(tb.findall("step"), key=lambda step: int(step.attrib["s"]))
        blocks.append(
            ThreadBlock(
                steps=tuple(_step(step, number) for step in steps),
                receives_from=None if recv < 0 else (recv, channel),
                sends_to=None if send < 0 else (send, channel),
            )
        )
    return blocks


def _step(step: Element, number: dict[int, int]) -> BlockStep:
    kind = step.attrib["type"]
    receives, reads, writes, sends = _TYPES[kind]
    src = Slot(step.attrib["srcbuf"], int(step.attrib["srcoff"]))
    dst = Slot(step.attrib["dstbuf"], int(step.attrib["dstoff"]))
    sources = (src, dst) if kind == "re" else (src,) if reads else ()
    waits = int(step.attrib["depid"])
    return BlockStep(
        sources=sources,
        targets=(dst,) if writes else (),
        count=int(step.attrib["cnt"]) if kind != "nop" else 0,
        receives=receives,
        sends=sends,
        waits_for=None if waits < 0 else (number[waits], int(step.attrib["deps"])),
    )


def to_msccl(program: CollectiveProgram) -> str:
    """The program as XML."""
    per_loop = max(max(program.num_input), max(program.num_output))
    top = Element("algo", {
        "name": program.name, "proto": "Simple", "nchannels": str(_channels(program)),
        "nchunksperloop": str(per_loop), "ngpus": str(program.num_ranks),
        "coll": "reduce_scatter" if program.collective == "reducescatter" else program.collective,
        "inplace": str(int(program.in_place)), "outofplace": str(int(not program.in_place)),
        "minBytes": "0", "maxBytes": "0", "root": str(program.root),
    })  # fmt: skip
    for rank, blocks in enumerate(program.blocks):
        gpu = ElementTree.SubElement(top, "gpu", {
            "id": str(rank), "i_chunks": str(program.num_input[rank]),
            "o_chunks": str(program.num_output[rank]),
            "s_chunks": str(program.num_scratch[rank]),
        })  # fmt: skip
        awaited = {step.waits_for for block in blocks for step in block.steps}
        for index, block in enumerate(blocks):
            send, recv = block.sends_to, block.receives_from
            channel = (send or recv or (0, 0))[1]
            tb = ElementTree.SubElement(gpu, "tb", {
                "id": str(index), "send": str(send[0] if send else -1),
                "recv": str(recv[0] if recv else -1), "chan": str(channel),
            })  # fmt: skip
            for number, step in enumerate(block.steps):
                has_dependent = (index, number) in awaited
                ElementTree.SubElement(tb, "step", _attributes(step, number, has_dependent))
    ElementTree.indent(top)
    return ElementTree.tostring(top, encoding="unicode") + "\n"


def _channels(program: CollectiveProgram) -> int:
    used = [
        wire[1] for blocks in program.blocks for block in blocks
        for wire in (block.sends_to, block.receives_from) if wire is not None
    ]  # fmt: skip
    return 1 + max(used, default=0)


def _attributes(step: BlockStep, number: int, has_dependent: bool) -> dict[str, str]:
    flags = (step.receives, bool(step.sources), bool(step.targets), step.sends)
    kind = next(name for name, known in _TYPES.items() if known == flags)
    if kind == "cpy" and len(step.sources) == 2:
        kind = "re"
    src = step.sources[0] if step.sources else Slot("i", -1 if kind == "nop" else 0)
    dst = step.targets[0] if step.targets else Slot("o", -1 if kind == "nop" else 0)
    block, after = step.waits_for or (-1, -1)
    return {
        "s": str(number), "type": kind, "srcbuf": src.buffer, "srcoff": str(src.offset),
        "dstbuf": dst.buffer, "dstoff": str(dst.offset), "cnt": str(step.count),
        "depid": str(block), "deps": str(after), "hasdep": str(int(has_dependent)),
    }  # fmt: skip
