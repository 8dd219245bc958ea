"""Third-party models drawn by a seed from transformers' own lists, with their default configs.

No constant was chosen with them and nobody picked them: model types of three tasks are shuffled,
and the first that build on meta, run one step there and have 20 M to 1.5 B parameters are taken.
The draw depends on the version of transformers, which each row names. A type without a default
config that runs (wrong sizes, missing packages) is skipped; ``skipped`` says why.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as hf
from models import Batch, Model, images, tokens
from torch import nn
from transformers.models.auto import modeling_auto as auto

SEQ = 512
FEWEST, MOST = 20_000_000, 1_500_000_000
_TASKS: dict[str, tuple[Any, Any]] = {
    "causal": (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, hf.AutoModelForCausalLM),
    "masked": (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, hf.AutoModelForMaskedLM),
    "image": (
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, hf.AutoModelForImageClassification,
    ),
}  # fmt: skip
skipped: dict[str, str] = {}
"""Names that were drawn and not taken, with the reason."""


def drawn(seed: int, count: int) -> list[Model]:
    """So many models of all tasks in turn."""
    rng = random.Random(seed)
    sources = []
    for task, (names, _) in _TASKS.items():
        types = sorted(names)
        rng.shuffle(types)
        sources.append(_taken(task, types))
    found: list[Model] = []
    while len(found) < count and sources:
        for source in list(sources):
            model = next(source, None)
            if model is None:
                sources.remove(source)
            elif len(found) < count:
                found.append(model)
    return found


def named(names: list[str], task_of: dict[str, str]) -> list[Model]:
    """Models of these types, as they were drawn with some version of transformers.

    A type can belong to several tasks with other modules: ``task_of`` holds those that were drawn.
    """
    first = {name: task for task, (known, _) in reversed(_TASKS.items()) for name in known}
    return [_model(task_of.get(name, first[name]), name) for name in names if name in first]


def _taken(task: str, types: list[str]) -> Iterator[Model]:
    for name in types:
        try:
            model = _model(task, name)
            num_parameters = _tried(model)
        except Exception as error:
            skipped[name] = f"{type(error).__name__}: {error}".partition("\n")[0][:120]
            continue
        if FEWEST <= num_parameters <= MOST:
            yield model
        else:
            skipped[name] = f"{num_parameters / 1e6:.0f} M parameters"


def _model(task: str, name: str) -> Model:
    config = hf.AutoConfig.for_model(name)
    batch: Callable[[int], Batch]
    sizes = (8, 1)
    if task == "image":
        side = getattr(config, "image_size", 224)
        batch = images(side if isinstance(side, int) else side[0], max(config.num_labels, 1))
        sizes = (32, 2)
    else:
        config.use_cache = False
        # Models after RoBERTa count positions from the padding token's index on, which leaves fewer
        # than their table has; an index beyond it breaks the process on a GPU.
        positions = getattr(config, "max_position_embeddings", SEQ)
        positions -= 1 + (getattr(config, "pad_token_id", None) or 0)
        batch = tokens(min(SEQ, positions), config.vocab_size)

    def build() -> nn.Module:
        return _TASKS[task][1].from_config(config)

    return Model(name, task, build, batch, sizes)


def _tried(model: Model) -> int:
    """Parameters of a model that runs on meta."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        net = model.build()
    num_parameters = sum(parameter.numel() for parameter in net.parameters())
    if FEWEST <= num_parameters <= MOST:
        loss = net(**{key: value.to("meta") for key, value in model.batch(2).items()}).loss
        assert loss is not None, "no loss"
    return num_parameters
