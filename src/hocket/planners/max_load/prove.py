"""A second opinion on small problems: OR-tools CP-SAT, started from what is known.

One variable per piece and device, one per net and device that pays, which must be true where the
device has some but not all pieces of the net; minimise the largest sum. Times are rounded down to
whole numbers, so the solver's bound holds. One worker, a fixed seed and a limit in the solver's own
deterministic time make it the same on every run. Needs the extra "exact" and links that are alike.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.planners.max_load.classes import DeviceClasses
from hocket.planners.max_load.pieces import Pieces

MAX_PIECES = 64
"""More pieces take longer to prove than annealing takes to find what the solver would."""
_DETERMINISTIC_TIME = 2.0
_STEPS = 1 << 24
"""The known maximum load in whole numbers."""


class Proof(NamedTuple):
    """What the solver found."""

    device_of: IntArray
    """Per piece."""
    lower_bound_s: float


def can_prove(pieces: Pieces) -> bool:
    """Whether the solver is there and the problem small enough for it."""
    try:
        return 0 < pieces.num_pieces <= MAX_PIECES and find_spec("ortools") is not None
    except ValueError:  # sys.modules says None: blocked on purpose
        return False


def proven_best(pieces: Pieces, classes: DeviceClasses, known: IntArray, known_s: float) -> Proof:
    """The best placement that the solver finds; at worst the known one."""
    from ortools.sat.python import cp_model

    unit = _STEPS / known_s
    model = cp_model.CpModel()
    order = np.argsort(-classes.piece_s(pieces).min(axis=0), kind="stable")
    known = _in_order(known, classes, order)
    here = _placements(model, pieces, known)
    _forbid_twins(model, here, classes, order)
    most = model.new_int_var(0, _STEPS, "max load")
    every_net_s = classes.net_s(pieces)
    for kind, devices in enumerate(classes.devices):
        piece_s, net_s = classes.piece_s(pieces)[kind], every_net_s[kind]
        seconds = np.where(np.isfinite(piece_s), piece_s, 0.0)
        for device in devices.tolist():
            on = [row[device] for row in here]
            cut = _cuts(model, pieces, on) if net_s.any() else []
            model.add(_weighted(seconds * unit, on) + _weighted(net_s * unit, cut) <= most)
            model.add(_weighted(pieces.memory_bytes, on) <= int(classes.limit_bytes[kind]))
    model.minimize(most)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = _DETERMINISTIC_TIME
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Proof(known, 0.0)
    chosen = [[solver.boolean_value(one) for one in row].index(True) for row in here]
    return Proof(np.array(chosen, dtype=np.int32), solver.best_objective_bound / unit)


def _in_order(known: IntArray, classes: DeviceClasses, order: LongArray) -> IntArray:
    """The known placement with the devices of each class numbered as ``order`` meets them."""
    number = np.arange(int(classes.counts.sum()), dtype=np.int32)
    for devices in classes.devices:
        met = [device for device in dict.fromkeys(known[order].tolist()) if device in devices]
        unmet = [device for device in devices.tolist() if device not in met]
        number[met + unmet] = devices
    return number[known]


def _forbid_twins(
    model: Any, here: list[list[Any]], classes: DeviceClasses, order: LongArray
) -> None:
    """Of placements that differ only in the numbers of equal devices, leave few.

    Numbered as the order of the pieces meets them, the first piece is on the first device of its
    class, the second on one of the first two, and so on.
    """
    for rank, piece in enumerate(order.tolist()):
        for devices in classes.devices:
            for device in devices[rank + 1 :].tolist():
                model.add(here[piece][device] == 0)


def _placements(model: Any, pieces: Pieces, known: IntArray) -> list[list[Any]]:
    """[piece][device]: whether the piece is there; the known placement is the hint."""
    here = []
    for piece, can_run in enumerate(np.isfinite(pieces.seconds).T.tolist()):
        row = [model.new_bool_var(f"{piece} on {device}") for device in range(len(can_run))]
        model.add_exactly_one(row)
        for device, variable in enumerate(row):
            model.add_hint(variable, bool(known[piece] == device))
            if not can_run[device]:
                model.add(variable == 0)
        here.append(row)
    return here


def _cuts(model: Any, pieces: Pieces, on: list[Any]) -> list[Any]:
    """Per net: whether one device has some but not all of its pieces."""
    bounds, members = pieces.net_ptr.tolist(), pieces.net_pieces.tolist()
    cut = []
    for net in range(pieces.num_nets):
        variable = model.new_bool_var(f"{net} cut")
        tied = members[bounds[net] : bounds[net + 1]]
        # Around a ring of its pieces, some pair is (in, out) exactly where the net is cut.
        for piece, following in zip(tied, tied[1:] + tied[:1], strict=True):
            model.add_bool_or(on[piece].negated(), on[following], variable)
        cut.append(variable)
    return cut


def _weighted(weights: FloatArray | LongArray, variables: list[Any]) -> Any:
    """The sum of whole parts of weights times variables."""
    return sum(int(weight) * variable for weight, variable in zip(weights, variables, strict=False))
