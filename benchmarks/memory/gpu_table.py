"""What the rows of a run say, as tables.

python benchmarks/memory/gpu_table.py DIR       # reads DIR/rows.jsonl, writes DIR/table.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def write_table(folder: Path) -> None:
    """All tables, and what is missing in them."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["row"], []).append(row)
    parts = [
        _rates(by_name.get("rates", [])),
        _deepest(by_name.get("deepest", []), by_name.get("large", [])),
        _large(by_name.get("uncapped", []), by_name.get("large", [])),
        _busy(by_name.get("planned", []), by_name.get("large", [])),
        _replays(by_name.get("replay", [])),
        _pairs(by_name.get("pair", [])),
        _losses(by_name.get("losses", [])),
        _failed(rows),
        _times(by_name.get("phase", [])),
    ]
    (folder / "table.md").write_text("\n\n".join(part for part in parts if part) + "\n")


def _grid(title: str, head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    body = [f"| {' | '.join(cells)} |" for cells in lines]
    if not body:
        return ""
    return "\n".join(
        [f"## {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|", *body]
    )


def _rates(rows: list[Row]) -> str:
    cells = [(key, f"{value:.1f}") for row in rows for key, value in row.items()
             if isinstance(value, float) and key != "at_s"]  # fmt: skip
    return _grid("The machine", ("rate", "measured"), cells)


def _fits(row: Row) -> bool:
    return "error" not in row


def _deepest(rows: list[Row], large: list[Row]) -> str:
    """The largest that each system trains under each cap, and how it compares with eager's."""
    # A part that was ended says of no system.
    tried = [row for row in (*rows, *large) if "system" in row]
    best: dict[tuple[str, float], Row] = {}
    failed: dict[tuple[str, float], Row] = {}
    for row in tried:
        key = row["system"], row["cap_gib"]
        if not _fits(row):
            failed[key] = row
        elif key not in best or row["params"] > best[key]["params"]:
            best[key] = row
    lines = []
    for system, cap in sorted({**best, **failed}, key=lambda key: key[1]):
        row, eager = best.get((system, cap)), best.get(("eager", cap))
        no = failed.get((system, cap))
        why = "" if no is None else f"{no['layers']} layers: {no['error'].partition(':')[0]}"
        cells = ("–",) * 4
        if row is not None:
            times = "–" if eager is None else f"{row['params'] / eager['params']:.1f}"
            peak = f"{row.get('peak_gib', 0):.2f} GiB"
            cells = (f"{row['layers']} x {row['width']}", _billions(row), times, peak)
        lines.append((f"{cap:g} GiB", system, *cells, why))
    head = ("cap", "system", "layers x width", "parameters", "times eager's", "peak", "failed")
    return _grid("The largest GPT under a cap", head, lines)


def _large(uncapped: list[Row], rows: list[Row]) -> str:
    """Steps of the large model, as predicted and as measured."""
    base = next((row for row in uncapped if _fits(row)), None)
    head = ("system", "layers", "cap", "micro-batches", "step", "times uncapped", "predicted step",
            "peak", "predicted peak", "losses beside uncapped")  # fmt: skip
    lines = []
    for row in [*uncapped, *rows]:
        if not _fits(row):
            continue
        is_same = base is not None and base["params"] == row["params"]
        times = f"{row['step_s'] / base['step_s']:.2f}" if base is not None and is_same else "–"
        apart = _apart(row["losses"], base["losses"]) if base is not None and is_same else "–"
        cap = "none" if row["cap_gib"] is None else f"{row['cap_gib']:g} GiB"
        lines.append((
            row.get("system", "eager"), f"{row['layers']}, {_billions(row)}", cap,
            str(row.get("micro_batches", 1)), _seconds(row), times, _step_error(row),
            f"{row.get('peak_gib', 0):.3f} GiB", _peak_error(row), apart,
        ))  # fmt: skip
    return _grid("Steps of the large GPT", head, lines)


def _busy(planned: list[Row], rows: list[Row]) -> str:
    """Where the time of the large model goes, measured and predicted."""
    head = ("system", "cap", "step", "kernels", "to device", "to host", "updates on the host",
            "GB/s of updates", "GB to device, to host", "mix")  # fmt: skip
    lines = []
    for row in (r for r in rows if _fits(r) and "mix" in r):
        where, told = row["where"], row["predicted"]
        pairs = (("kernels_s", "compute_s"), ("to_device_s", "copy_in_s"),
                 ("to_host_s", "copy_out_s"))  # fmt: skip
        cells = [f"{where.get(a, 0):.3f} s ({told.get(b, 0):.3f})" for a, b in pairs]
        cells.append(f"{row['updates_s']:.3f} s ({told.get('host_s', 0):.3f})")
        cells.append(f"{row['updates_gbps']:.1f}" + ("" if row["one_pass"] else ", in two passes"))
        moved = f"{told.get('to_device_gb', 0):.1f}, {told.get('to_host_gb', 0):.1f}"
        lines.append((row["system"], f"{row['cap_gib']:g} GiB",
                      f"{row['step_s']:.3f} s ({row['predicted_step_s']:.3f})", *cells, moved,
                      row["mix"]))  # fmt: skip
    rates = ", ".join(
        f"updates {row['host_update_gbps']:.1f} GB/s, link {row['link_gbps']:.1f} in, "
        f"{row['out_gbps']:.1f} out, planned in {row['seconds']:.1f} s"
        for row in planned
    )
    return _grid(f"Who works how long in a step (predicted; {rates})", head, lines)


def _replays(rows: list[Row]) -> str:
    head = ("model", "size, parameters", "system", "cap", "step", "times uncapped",
            "predicted step", "kernels", "peak", "predicted peak", "ready after", "launched",
            "losses beside uncapped")  # fmt: skip
    lines = []
    for row in sorted(rows, key=lambda row: str(row["model"])):
        if not _fits(row):
            continue
        base = next((other for other in rows if other["model"] == row["model"]
                     and other["system"] == "eager" and _fits(other)), None)  # fmt: skip
        lines.append((
            row["model"], f"{row['size']}, {_billions(row)}", row["system"],
            "none" if row["cap_gib"] is None else f"{row['cap_gib']:g} GiB", _seconds(row),
            "–" if base is None else f"{row['step_s'] / base['step_s']:.2f}", _step_error(row),
            f"{row['where']['kernels_s']:.3f} s" if row.get("where", {}).get("kernels_s") else "–",
            f"{row.get('peak_gib', 0):.3f} GiB", _peak_error(row), f"{row['ready_s']:.0f} s",
            row.get("launched", "call by call"),
            "–" if base is None else _apart(row["losses"], base["losses"]),
        ))  # fmt: skip
    return _grid("Replays", head, lines)


def _pairs(rows: list[Row]) -> str:
    head = ("model", "budget", "predicted peak", "counted", "predicted over counted", "kept",
            "predicted step", "step", "losses beside the largest budget's")  # fmt: skip
    largest = {row["model"]: row for row in sorted(rows, key=lambda row: int(row["budget"]))}
    lines = [
        (
            _grouped(row), f"{row['budget']:,}", f"{row['predicted']:,}", f"{row['counted']:,}",
            f"{100 * (row['predicted'] / row['counted'] - 1):+.2f} %",
            "yes" if row["kept"] else "**no**",
            f"{row['predicted_step_s'] * 1e3:.1f} ms", f"{row['step_s'] * 1e3:.1f} ms",
            _apart(row["losses"], largest[row["model"]]["losses"]),
        )
        for row in sorted(rows, key=lambda row: (row["model"], row["budget"]))
    ]  # fmt: skip
    kept = sum(row["kept"] for row in rows)
    near = sum(abs(row["predicted"] / row["counted"] - 1) <= 0.02 for row in rows)
    told = f"Pairs of model and budget: {kept} of {len(rows)} kept, {near} predicted within 2 %"
    return "\n\n".join(part for part in (_grid(told, head, lines), _peaks(rows)) if part)


def _grouped(row: Row) -> str:
    groups = row["expert_groups"]
    return str(row["model"]) if groups == 1 else f"{row['model']}, in {groups}"


def _peaks(rows: list[Row]) -> str:
    """Where the peaks of pairs lie that are not predicted to the byte."""
    head = ("model", "budget", "allocated at", "of it inside one op",
            "forward, backward, update", "not measured")  # fmt: skip
    lines = [
        (
            row["model"], f"{row['budget']:,}", row["allocated_at"],
            f"{row['allocated'] - row['without_temporaries']:,}",
            ", ".join(f"{row['phases'].get(phase, 0):,}"
                      for phase in ("forward", "backward", "update")),
            ", ".join(row.get("not_measured", {})),
        )
        for row in sorted(rows, key=lambda row: (row["model"], row["budget"]))
        if row["predicted"] != row["counted"]
    ]  # fmt: skip
    return _grid("Peaks of pairs that are not as predicted", head, lines)


def _losses(rows: list[Row]) -> str:
    head = ("in", "steps", "plain, run again", "plain in two parts", "every block recomputed",
            "the same bits", "and the loss in 8 chunks", "within half of the memory",
            "chunks there")  # fmt: skip
    lines = [
        (
            f"{row['in']}, {row['params'] / 1e6:.1f} M", str(row["steps"]),
            f"{row['plain_again']:.1e}", f"{row['plain_in_two_parts']:.1e}",
            f"{row['recomputed']['worst']:.1e}", f"{row['recomputed']['same_bits']}",
            f"{row['in_chunks']['worst']:.1e}", f"{row['within_half']['worst']:.1e}",
            str(row["within_half"]["chunks"]),
        )
        for row in rows
    ]  # fmt: skip
    return _grid("Losses: the worst relative difference from plain PyTorch", head, lines)


def _failed(rows: list[Row]) -> str:
    lines = [
        (
            row["row"], str(row.get("system", row.get("model", row.get("parts", "")))),
            str(row.get("layers", row.get("size", ""))), f"{row.get('cap_gib') or 0:g}",
            row["error"].replace("\n", " ").replace("|", "/")[:200],
        )
        for row in rows if "error" in row
    ]  # fmt: skip
    return _grid("What failed, and why", ("row", "system", "size", "cap, GiB", "why"), lines)


def _times(rows: list[Row]) -> str:
    lines = [(", ".join(row["parts"]), f"{row['took_s']:.0f} s") for row in rows]
    return _grid("Where the seconds went", ("parts", "took"), lines)


def _billions(row: Row) -> str:
    return f"{row['params'] / 1e9:.3f} B"


def _seconds(row: Row) -> str:
    return f"{row['step_s']:.3f} s ({', '.join(f'{t:.3f}' for t in row['times'])})"


def _step_error(row: Row) -> str:
    found = row.get("predicted_step_s")
    return "–" if found is None else f"{found:.3f} s ({100 * (found / row['step_s'] - 1):+.0f} %)"


def _peak_error(row: Row) -> str:
    found, peak = row.get("predicted_peak_gib"), row.get("peak_gib")
    if found is None:
        return "–"
    return f"{found:.3f} GiB" + (f" ({100 * (found / peak - 1):+.2f} %)" if peak else "")


def _apart(ours: list[float], theirs: list[float]) -> str:
    pairs = list(zip(ours, theirs, strict=False))
    return f"{max(abs(a - b) / abs(b) for a, b in pairs):.1e} in {len(pairs)}"


if __name__ == "__main__":
    write_table(Path(sys.argv[1]))
