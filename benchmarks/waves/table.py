"""The table of all rows of a run of `all_rows.py`, from its lines.

python benchmarks/waves/table.py FOLDER/rows.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LANES, WHOLE, ONE = "two lanes", "whole batch, replayed", "one lane, replayed"
ROWS = "two rows of kernels"
REDUCE = "compiled + CUDA graphs (reduce-overhead)"
OURS = (LANES, "two lanes, shared memory", "two lanes, lean", WHOLE, ONE,
        "hocket.prepare(compiled=True)")  # fmt: skip
Found = dict[str, dict[str, dict[str, Any]]]


def table_of(path: Path) -> str:
    """All rows, gains, losses and pairs, as Markdown."""
    found: Found = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["workload"], {})[row["system"]] = row
    pairs = found.pop("pairs", {})
    parts = [_rows(found), _gains(found), _losses(found), _pairs(pairs)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _rows(found: Found) -> str:
    head = ("workload", "system", "samples/s", "spread", "kernels run", "peak, GiB", "of plan",
            "predicted", "predicted / measured")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for workload, systems in found.items():
        for system in sorted(systems, key=_place):
            row = systems[system]
            if system.startswith(("losses", "planned", ROWS)):
                continue
            if "failed" in row:
                lines.append(f"| {workload} | {system} | {row['failed']} | | | | | | |")
                continue
            cells = [workload, system, f"{row['samples_per_s']:,.1f}", f"{row['spread']:.2f}",
                     f"{row['busy']:.0%}", f"{row['peak_gib']:.3f}"]  # fmt: skip
            if "predicted" in row:
                share = row["peak_gib"] / row["planned_gib"]
                ratio = row["predicted"] / row["samples_per_s"]
                cells += [f"{share:.3f}", f"{row['predicted']:,.1f}", f"{ratio:.2f}"]
            else:
                cells += ["", "not predicted", ""]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _place(system: str) -> tuple[int, str]:
    """Ours first, then the others by name."""
    return OURS.index(system) if system in OURS else len(OURS), system


def _gains(found: Found) -> str:
    """Two lanes over the best without, as predicted and as measured, and ours over the usual."""
    head = ("workload", "gain of two lanes, predicted", "measured", "off",
            "two lanes over one, predicted", "measured", "two rows of kernels, of one",
            "planned, of one wave", "lean", "best of ours", "over reduce-overhead")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for workload, systems in found.items():
        speed = {name: row.get("samples_per_s") for name, row in systems.items()}
        told = {name: row.get("predicted") for name, row in systems.items()}
        cells = [workload]
        for base in ((WHOLE, ONE), (ONE,)):
            gains = [_over(each, LANES, base) for each in (told, speed)]
            cells += [f"{gain:.2f}" if gain else "" for gain in gains]
            if len(base) > 1:
                off = abs(gains[0] / gains[1] - 1) if gains[0] and gains[1] else None
                cells.append("" if off is None else f"{off:.0%}")
        cells.append(systems.get(ROWS, {}).get("of_one", ""))
        cells += [f"{systems[name]['one_wave']:.2f}" if name in systems else ""
                  for name in ("planned", "planned, lean")]  # fmt: skip
        ours = {name: speed[name] for name in OURS if speed.get(name)}
        best = max(ours, key=lambda name: ours[name], default="")
        cells.append(f"{best} {ours[best]:,.1f}" if best else "")
        usual = speed.get(REDUCE)
        cells.append(f"{ours[best] / usual:.2f} x" if best and usual else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _over(speed: dict[str, Any], name: str, base: tuple[str, ...]) -> float | None:
    alone = [speed[each] for each in base if speed.get(each)]
    return speed[name] / max(alone) if alone and speed.get(name) else None


def _losses(found: Found) -> str:
    lines = ["| workload | steps | same bits as one lane | last loss | |", "|---|---|---|---|---|"]
    for workload, systems in found.items():
        for system, row in systems.items():
            if system.startswith("losses"):
                told = row.get("failed") or row.get("told", "")
                last = f"{row['last']:.6f}" if "last" in row else ""
                same = row.get("same_as_one_lane", "")
                lines.append(f"| {workload} | {system[8:]} | {same} | {last} | {told} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _pairs(pairs: dict[str, dict[str, Any]]) -> str:
    kernels = ["| kernel | alone, us | predicted / measured | on the device | fills |",
               "|---|---|---|---|---|"]  # fmt: skip
    rows = ["| pair | alone, ms | together, ms | pace | simulated |", "|---|---|---|---|---|"]
    num_near = 0
    for name, row in pairs.items():
        if "failed" in row:
            rows.append(f"| {name} | {row['failed']} | | | |")
        elif "pace" in row:
            num_near += abs(row["pace"] - row["simulated"]) <= 0.1
            rows.append(f"| {name} | {row['alone_ms']:.2f} | {row['both_ms']:.2f} | "
                        f"{row['pace']:.2f} | {row['simulated']:.2f} |")  # fmt: skip
        else:
            kernels.append(f"| {name} | {row['alone_us']:.1f} | {row['predicted_of']:.2f} | "
                           f"{row['on_device']:.2f} | {row['fill']:.2f} |")  # fmt: skip
    if not pairs:
        return ""
    told = f"{num_near} of {len(rows) - 2} pairs within 0.1."
    return "\n".join(kernels) + "\n\n" + "\n".join(rows) + f"\n\n{told}"


if __name__ == "__main__":
    print(table_of(Path(sys.argv[1])))
