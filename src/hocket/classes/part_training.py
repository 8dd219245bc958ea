"""Train the parts; each result is stored on disk under a digest of all that it depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from hocket.classes.cut import PartCut, build_part
from hocket.classes.material import Material, Progress
from hocket.classes.sources import load_arrays, state_arrays
from hocket.classes.steps import Steps, key_of
from hocket.classes.training import train_parts


def trained_parts(
    material: Material, steps: Steps, cuts: Sequence[PartCut], progress: Progress
) -> tuple[nn.Module, ...]:
    """Return trained parts for some cuts, training together those that are not stored."""
    recipe = material.request.retraining.__dict__
    keys = [key_of(material.digest, cut.classes, cut.kept, cut.omitted, recipe) for cut in cuts]
    missing = {
        index: cut
        for index, cut in enumerate(cuts)
        if steps.get(f"part-{index}", keys[index]) is None
    }
    if missing:
        trained = _trained_together(material, missing, progress)
        for index, part in trained.items():
            steps.put(f"part-{index}", keys[index], state_arrays(part))
    # Read back even if just trained, so that a resumed split continues with exactly the same bits.
    return tuple(
        _loaded(material, steps, index, keys[index], cut) for index, cut in enumerate(cuts)
    )


def _trained_together(
    material: Material, cuts: Mapping[int, PartCut], progress: Progress
) -> dict[int, nn.Module]:
    """Train parts side by side on the same batches."""
    device = material.request.device
    parts = [
        build_part(material.net, material.structure, material.example, cut).to(device)
        for cut in cuts.values()
    ]
    train_parts(
        parts,
        [cut.classes for cut in cuts.values()],
        material.net,
        material.splits.train,
        material.request.retraining,
        material.splits.augment,
        lambda *far: progress(f"retrain {len(parts)} sub-models", *far),
    )
    return dict(zip(cuts, parts, strict=True))


def _loaded(material: Material, steps: Steps, index: int, key: str, cut: PartCut) -> nn.Module:
    part = build_part(material.net, material.structure, material.example, cut)
    saved = steps.get(f"part-{index}", key)
    assert saved is not None
    load_arrays(part, saved)
    return part.eval()
