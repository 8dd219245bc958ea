"""Export to plain PyTorch: one script that needs only PyTorch, and the schedule as CSV.

The script contains the model of `hocket run` and a trainer on PyTorch's own engines, copied from
the source files of hocket (`_PARTS`).
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from importlib.resources import files
from typing import Literal

from hocket.export.common import launch, plain, refuse_dtype, refuse_for_torch
from hocket.plan.transformer_plan import TransformerPlan
from hocket.planners.parallel.schedules.torch_csv import to_torch_csv
from hocket.transformer import ParallelConfig

DataKind = Literal["none", "ddp", "reduce-after", "fsdp", "fsdp-reshard"]
"""Gradient synchronization of data-parallel ranks: none, DDP, one reduction after the last
backward, or FSDP2, which with ``fsdp-reshard`` releases gathered weights after each forward.
"""


def data_kind(config: ParallelConfig, *, splits_backward: bool) -> DataKind:
    """Choose the gradient synchronization of an exported script.

    DDP reduces gradients in hooks that a split backward pass does not call, so such gradients are
    reduced after the last backward. The same holds if tensor-parallel ranks hold shards of
    matrices, which DDP does not support. ZeRO 1 and 2 keep weights gathered for the whole step.
    PyTorch's pipelines sum the unsharded gradients of microbatches and divide them once at the end,
    so ZeRO 1 and 2 are the same program.
    """
    if config.data == 1:
        return "none"
    if config.zero:
        return "fsdp-reshard" if config.zero == 3 else "fsdp"
    return "reduce-after" if splits_backward or config.tensor > 1 else "ddp"


Imports = dict[str, set[str]]
"""Imported names by module; whole modules are listed under the empty name."""
CSV = "schedule.csv"
_NOT_NEEDED = ("hocket", "__future__", "numpy", "difflib")
"""Packages that the script does not import: hocket, and packages of omitted code."""
_PARTS: tuple[tuple[str, str, Collection[str] | None], ...] = (
    ("hocket.base", "errors.py", ("HocketError", "UsageError", "MissingExtraError", "RunError")),
    ("hocket.transformer", "shape.py", None),
    ("hocket.transformer", "parallel_config.py", ("Recompute", "ScheduleName", "ParallelConfig")),
    ("hocket.export", "torch.py", ("DataKind",)),
    ("hocket.runtime", "transformer_model.py", None),
    ("hocket.export", "torch_trainer.py", None),
)
"""Package, file and names of the copied source; None copies all names."""


def torch_files(plan: TransformerPlan) -> dict[str, str]:
    """The script and its schedule; raises `UsageError` if PyTorch cannot run the plan correctly."""
    refuse_for_torch(plan)
    refuse_dtype(plan, "the script for PyTorch")
    return {"train.py": _script(plan), CSV: to_torch_csv(plan.schedule)}


def _script(plan: TransformerPlan) -> str:
    imports: Imports = {}
    bodies = []
    for package, name, wanted in _PARTS:
        text = files(package).joinpath(name).read_text(encoding="utf-8")
        bodies.append(_taken(text, wanted, imports))
    head = (
        f'"""Train {plain(plan.model.name)} on {plan.config.num_devices} devices of '
        f"{plain(plan.cluster.name)}, parallelized as planned.\n\n"
        f'Start on every machine: {launch(plan, "train.py")}\n"""'
    )
    parts = [head, "from __future__ import annotations", _import_lines(imports)]
    return "\n\n".join(parts) + "\n\n\n" + "\n\n\n".join([*bodies, _start(plan)])


def _taken(text: str, wanted: Collection[str] | None, imports: Imports) -> str:
    """Copy the wanted parts of a module's source; its imports are added to ``imports``."""
    lines = text.splitlines()
    tree = ast.parse(text)
    taken: list[str] = []
    keeps_text = False
    for position, node in enumerate(tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            _note_imports(node, imports)
            continue
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_text:
            # A docstring below an assignment belongs to that assignment and is copied with it.
            keeps_text = wanted is None or bool(set(_names(node)) & set(wanted))
        if keeps_text and not (is_text and position == 0):
            taken.append(_source(lines, node, joins=is_text or not _is_block(node)))
    return "".join(taken).strip("\n")


def _source(lines: list[str], node: ast.stmt, *, joins: bool) -> str:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(found.lineno for found in decorators)])
    code = "\n".join(lines[first - 1 : node.end_lineno])
    return f"{code}\n" if joins else f"\n\n{code}\n\n\n"


def _is_block(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.ClassDef)


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    yield from (target.id for target in targets if isinstance(target, ast.Name))


def _note_imports(node: ast.Import | ast.ImportFrom, imports: Imports) -> None:
    """Collect the imports of a module from packages outside hocket."""
    module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
    for name in node.names:
        if (module or name.name).partition(".")[0] not in _NOT_NEEDED:
            imports.setdefault(module, set()).add(ast.unparse(name))


def _import_lines(imports: Imports) -> str:
    whole = [f"import {name}" for name in sorted(imports.get("", ()))]
    parts = [
        f"from {module} import ({', '.join(sorted(names))})"
        for module, names in sorted(imports.items())
        if module
    ]
    return "\n".join([*whole, *parts])


def _start(plan: TransformerPlan) -> str:
    data = data_kind(plan.config, splits_backward=plan.schedule.splits_backward)
    return f"""if __name__ == "__main__":
    train(
        TrainingJob(
            model={plan.model!r},
            config={plan.config!r},
            layers={plan.config.stage_layers(plan.model.layers)!r},
            actions=read_actions(Path(__file__).with_name("{CSV}")),
            device_of_stage={tuple(plan.schedule.device_of_stage.tolist())!r},
            data={data!r},
            dtype={plan.dtype!r},
        )
    )
"""
