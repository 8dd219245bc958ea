"""Train public models at toy size with hocket.prepare beside plain PyTorch, one row per model.

    python benchmarks/thirdparty/public_models.py --rows models.jsonl [--only timm] [--path DIR]

The models are those of manifest.toml; packages that are missing are skipped with their reason. Rows
that are in ``--rows`` are not run again; the table is printed at the end.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import multiprocessing
import random
import sys
import time
import tomllib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import hocket
from hocket.base.errors import HocketError, NoFeasiblePlanError
from hocket.base.units import parse_bytes
from hocket.runtime.offload.memory_tracker import MemoryTracker

NUM_STEPS = 3
BATCH, LENGTH = 2, 16
CLOSE = 1e-6
_MISSING = object()


class Subject(NamedTuple):
    """A model that can be built again and again, with a batch of it."""

    build: Callable[[], nn.Module]
    batch: Any
    forward: Callable[[nn.Module, Any], torch.Tensor] | None = None
    checkpoint: Callable[[nn.Module], None] | None = None
    """Switches the library's own activation checkpointing on."""


class Row(NamedTuple):
    """What became of one model."""

    name: str
    result: str
    """``equal``, ``close``, ``wrong``, ``failed``; ``plain`` if PyTorch itself fails."""
    how: str = ""
    worst: float = 0.0
    under_budget: str = ""
    kept: str = ""
    """Largest budget that was tried, and what its dry run holds."""
    least_percent: float | None = None
    """Least memory that hocket trains in, of the plain step's."""
    checkpointing_percent: float | None = None
    prepare_s: float = 0.0
    budget_s: float = 0.0
    what: str = ""


def subjects(manifest: dict[str, Any], wanted: str) -> Iterator[tuple[str, Callable[[], Subject]]]:
    """Names and makers of all models of the manifest."""
    makers: dict[str, Callable[[dict[str, Any]], Iterator[tuple[str, Callable[[], Subject]]]]] = {
        "transformers": of_transformers, "timm": of_timm, "torchvision": of_torchvision,
        "vit_pytorch": of_vit_pytorch, "x_transformers": of_x_transformers, "programs": of_programs,
    }  # fmt: skip
    for package, make in makers.items():
        for name, subject in make(manifest[package]):
            if wanted in f"{package} {name}":
                yield f"{package} {name}", subject


# ── packages ────────────────────────────────────────────────────────────────────────────────────


def of_transformers(section: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Subject]]]:
    for task in ("causal", "masked", "seq2seq", "image", "audio"):
        for name in section[task]["models"]:
            settings = {**section["common"], **section["extra"].get(name, {})}
            if task == "audio":
                settings |= section["extra"]["wav2vec2"]
            yield (
                name,
                lambda task=task, name=name, settings=settings: hf_subject(task, name, settings),
            )


def hf_subject(task: str, name: str, settings: dict[str, Any]) -> Subject:
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model(name)
    for part in (config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))):
        for key, value in settings.items():
            key = getattr(part, "attribute_map", {}).get(key, key)
            now = vars(part).get(key, _MISSING)
            if now is not _MISSING and isinstance(now, list | tuple) == isinstance(value, list):
                setattr(part, key, value)
        if vars(part).get("layer_types"):
            part.layer_types = part.layer_types[: part.num_hidden_layers]
    if task == "seq2seq":
        config.decoder_start_token_id = settings["decoder_start_token_id"]
    auto = {
        "causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM",
        "seq2seq": "AutoModelForSeq2SeqLM", "image": "AutoModelForImageClassification",
        "audio": "AutoModelForCTC",
    }[task]  # fmt: skip
    words = torch.randint(3, 90, (BATCH, LENGTH))
    if task in ("causal", "masked"):
        batch = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}
    elif task == "seq2seq":
        batch = {"input_ids": words, "labels": words[:, :8].contiguous()}
    elif task == "image":
        size = getattr(config, "image_size", None) or getattr(
            config, "vision_config", config
        ).__dict__.get("image_size", 32)
        size = size[0] if isinstance(size, list | tuple) else size
        batch = {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.tensor([0, 1])}
    else:
        batch = {"input_values": torch.randn(BATCH, 800), "labels": words[:, :4].contiguous()}
    make = getattr(transformers, auto).from_config
    enable = lambda model: model.gradient_checkpointing_enable()  # noqa: E731
    return Subject(lambda: make(copy.deepcopy(config)), batch, checkpoint=enable)


def images(size: int, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, 3, size, size), torch.randint(0, classes, (BATCH,))


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    found = model(batch[0])
    logits = found if isinstance(found, torch.Tensor) else found[0]
    return nn.functional.cross_entropy(logits, batch[1])


def of_timm(section: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Subject]]]:
    def subject(name: str, size: int, options: dict[str, Any]) -> Subject:
        make = importlib.import_module("timm").create_model
        enable = lambda model: model.set_grad_checkpointing()  # noqa: E731
        return Subject(
            lambda: make(name, num_classes=4, **options), images(size), cross_entropy, enable
        )

    for name in section["models"]:
        yield (
            name,
            lambda name=name: subject(name, 96 if "inception" in name else section["size"], {}),
        )
    for name in section["sized"]["models"]:
        size = section["sized"]["size"]
        yield name, lambda name=name, size=size: subject(name, size, {"img_size": size})


def of_torchvision(section: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Subject]]]:
    def subject(name: str) -> Subject:
        models = importlib.import_module("torchvision.models")
        options: dict[str, Any] = {"num_classes": 4}
        size = 224 if name in ("maxvit_t",) else section["size"]
        if name == "googlenet":
            options |= {"aux_logits": False, "init_weights": False}
        return Subject(
            lambda: models.get_model(name, weights=None, **options), images(size), cross_entropy
        )

    for name in section["models"]:
        yield name, lambda name=name: subject(name)


def of_vit_pytorch(section: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Subject]]]:
    def subject(name: str) -> Subject:
        module, _, cls = name.partition(":")
        make = getattr(importlib.import_module(f"vit_pytorch.{module}"), cls)
        options = {**section["common"], **section["extra"].get(name, {})}
        return Subject(lambda: make(**options), images(section["size"]), cross_entropy)

    for name in section["models"]:
        yield name, lambda name=name: subject(name)


def of_x_transformers(section: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Subject]]]:
    def subject(name: str) -> Subject:
        x = importlib.import_module("x_transformers")
        kind, _, option = name.partition(", ")
        named = {"rotary": "rotary_pos_emb", "alibi": "alibi_pos_bias", "rmsnorm": "use_rmsnorm"}
        options = {named[option]: True} if option else {}

        def build() -> nn.Module:
            layers = (x.Decoder if kind == "decoder" else x.Encoder)(
                dim=32, depth=2, heads=4, **options
            )
            return x.TransformerWrapper(num_tokens=96, max_seq_len=64, attn_layers=layers)

        def forward(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(model(words).transpose(1, 2), words)

        return Subject(build, torch.randint(0, 96, (BATCH, LENGTH)), forward)

    for name in section["models"]:
        yield name, lambda name=name: subject(name)


def of_programs(section: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Subject]]]:
    for name in section["models"]:
        yield name, lambda name=name: program(name)


def loaded(path: str) -> Any:
    """A file of the folders on the path, as a module of its own."""
    for folder in map(Path, sys.path):
        if (folder / path).is_file():
            spec = importlib.util.spec_from_file_location(
                path.replace("/", "_")[:-3], folder / path
            )
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            # Examples read the command line when they are imported.
            arguments, sys.argv = sys.argv, [path]
            try:
                spec.loader.exec_module(module)
            finally:
                sys.argv = arguments
            return module
    raise ImportError(f"{path} is in no folder of --path")


def program(name: str) -> Subject:
    words = torch.randint(0, 96, (BATCH, LENGTH))
    if name == "nanoGPT":
        gpt = loaded("nanoGPT/model.py")
        config = gpt.GPTConfig(
            block_size=LENGTH, vocab_size=96, n_layer=2, n_head=4, n_embd=32, dropout=0.1
        )
        return Subject(lambda: gpt.GPT(config), (words, words), lambda m, b: m(*b)[1])
    if name == "minGPT":
        mingpt = importlib.import_module("mingpt.model")

        def build() -> nn.Module:
            config = mingpt.GPT.get_default_config()
            config.model_type, config.vocab_size, config.block_size = "gpt-nano", 96, LENGTH
            return mingpt.GPT(config)

        return Subject(build, (words, words), lambda m, b: m(*b)[1])
    if name.startswith("word_language_model"):
        models, kind = loaded("examples/word_language_model/model.py"), name.split()[-1]
        text = words.t().contiguous()
        if kind == "Transformer":
            return Subject(
                lambda: models.TransformerModel(96, 32, 4, 48, 2, 0.1), text,
                lambda m, b: nn.functional.nll_loss(m(b).view(-1, 96), b.view(-1)),
            )  # fmt: skip

        def recur(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            output, _ = model(batch, model.init_hidden(BATCH))
            return nn.functional.nll_loss(output, batch.view(-1))

        return Subject(lambda: models.RNNModel(kind, 96, 32, 32, 2, 0.1), text, recur)
    if name == "gat":
        gat = loaded("examples/gat/main.py")
        graph = torch.randn(10, 12), torch.ones(10, 10)
        return Subject(
            lambda: gat.GAT(12, 8, 2, 4), (graph, torch.randint(0, 4, (10,))),
            lambda m, b: nn.functional.nll_loss(m(*b[0]), b[1]),
        )  # fmt: skip
    module = loaded(f"examples/{name}/main.py")
    digits = torch.rand(BATCH, 1, 28, 28)
    if name == "mnist":
        batch = digits, torch.randint(0, 10, (BATCH,))
        return Subject(module.Net, batch, lambda m, b: nn.functional.nll_loss(m(b[0]), b[1]))
    if name == "vae":
        return Subject(
            module.VAE,
            digits,
            lambda m, b: module.loss_function(*(lambda r: (r[0], b, r[1], r[2]))(m(b))),
        )
    pair = digits, torch.rand(BATCH, 1, 28, 28), torch.ones(BATCH)
    return Subject(
        module.SiameseNetwork, pair,
        lambda m, b: nn.functional.binary_cross_entropy(m(b[0], b[1]).squeeze(), b[2]),
    )  # fmt: skip


# ── one model ───────────────────────────────────────────────────────────────────────────────────


def built(subject: Subject) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = subject.build().train()
    groups = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": groups[::2], "weight_decay": 0.1}, {"params": groups[1::2]}], 1e-3
    )
    torch.manual_seed(1)
    return model, optimizer


def seeded() -> None:
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)


def loss_of(subject: Subject, model: nn.Module) -> torch.Tensor:
    if subject.forward is not None:
        return subject.forward(model, subject.batch)
    loss: torch.Tensor = model(**subject.batch).loss
    return loss


def plain_steps(subject: Subject, prepare: Callable[[nn.Module], None] | None = None) -> Any:
    """Losses and the last state of plain PyTorch."""
    model, optimizer = built(subject)
    if prepare is not None:
        prepare(model)
    seeded()
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(subject, model)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        del loss
    return losses, model.state_dict()


def plain_peak(subject: Subject, prepare: Callable[[nn.Module], None] | None = None) -> int:
    tracker = MemoryTracker()
    with tracker:
        plain_steps(subject, prepare)
    return tracker.peak_bytes


def our_steps(subject: Subject, **options: Any) -> tuple[list[torch.Tensor], Any, Any, float]:
    model, optimizer = built(subject)
    started = time.perf_counter()
    train = hocket.prepare(model, optimizer, subject.batch, forward=subject.forward, **options)
    took = time.perf_counter() - started
    seeded()
    losses = [train.step(subject.batch).detach() for _ in range(NUM_STEPS)]
    train.state_dict()
    return losses, model.state_dict(), train, took


def distance(wanted: Any, found: Any) -> float:
    worst = 0.0
    for one, other in zip(tree_leaves(wanted), tree_leaves(found), strict=True):
        if isinstance(one, torch.Tensor) and not torch.equal(one, other):
            off = (one.double() - other.double()).abs().max() / (one.double().abs().max() + 1e-12)
            worst = max(worst, float(off.nan_to_num(float("inf"))))
    return worst


def judged(worst: float) -> str:
    return "equal" if not worst else "close" if worst <= CLOSE else f"wrong {worst:.1e}"


def run(name: str, make: Callable[[], Subject], *, budgets: bool = True) -> Row:
    """Train one model in plain PyTorch, by hocket, and by hocket within half of its memory."""
    row = Row(name, "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            subject = make()
            wanted = plain_steps(subject)
        except ImportError as error:
            return row._replace(result="missing", what=str(error)[:200])
        except Exception as error:  # this configuration does not run in PyTorch itself
            return row._replace(result="plain", what=f"{type(error).__name__}: {error}"[:200])
        try:
            *found, train, took = our_steps(subject)
            worst = distance(wanted, tuple(found))
            how = {"TracedModel": "ops", "PlacedModules": "modules"}.get(
                type(train._strategy).__name__, "eager"
            )
            row = row._replace(
                result=judged(worst).split()[0], worst=worst, how=how, what=train.lost[:200],
                prepare_s=round(took, 1),
            )  # fmt: skip
            return within_budget(row, subject, wanted) if budgets else row
        except Exception as error:  # whatever hocket raises is a failure of it
            frame = traceback.extract_tb(error.__traceback__)[-1]
            told = f"{type(error).__name__}: {error} at {Path(frame.filename).name}:{frame.lineno}"
            kind = "refused" if isinstance(error, HocketError) else "failed"
            return row._replace(result=row.result or kind, under_budget=kind, what=told[:300])


def isolated(name: str, make: Callable[[], Subject], *, budgets: bool) -> Row:
    """Run a model in a forked process, so that one that dies costs its own row only."""
    receive, send = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        send.send(run(name, make, budgets=budgets))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    send.close()
    try:
        row: Row = receive.recv()
    except EOFError:
        process.join()
        row = Row(name, "failed", what=f"the process died with exit code {process.exitcode}")
    process.join()
    return row


def within_budget(row: Row, subject: Subject, wanted: Any) -> Row:
    plain_bytes = plain_peak(subject)
    model, optimizer = built(subject)
    least = None
    try:
        hocket.prepare(model, optimizer, subject.batch, forward=subject.forward, memory=1)
    except NoFeasiblePlanError as error:
        least = parse_bytes(str(error.hint).partition('"')[2].partition('"')[0])
        row = row._replace(least_percent=round(100 * least / plain_bytes))
    if subject.checkpoint is not None:
        try:
            lean = plain_peak(subject, subject.checkpoint)
            row = row._replace(checkpointing_percent=round(100 * lean / plain_bytes))
        except Exception:
            pass
    budget = max(plain_bytes // 2, least or 0)
    *found, train, took = our_steps(subject, memory=budget)
    worst = distance(wanted, tuple(found))
    peak = train.memory.peak_bytes
    kept = "not known" if peak is None else "yes" if peak <= budget else "no"
    return row._replace(under_budget=judged(worst), kept=kept, budget_s=round(took, 1))


# ── table ───────────────────────────────────────────────────────────────────────────────────────


def table(rows: list[Row]) -> str:
    lines = [
        "| model | trained | traced | in half of the memory | kept | least, % of plain "
        "| own checkpointing, % | prepare s | with memory= s | note |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        worst = f" {row.worst:.0e}" if row.worst else ""
        cells = (
            row.name, row.result + worst, row.how, row.under_budget, row.kept,
            "" if row.least_percent is None else f"{row.least_percent:.0f}",
            "" if row.checkpointing_percent is None else f"{row.checkpointing_percent:.0f}",
            row.prepare_s or "", row.budget_s or "",
            row.what.split("\n")[0][:120].replace("|", "/"),
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    ran = [row for row in rows if row.result not in ("plain", "missing")]
    counts = Counter(row.result for row in ran)
    traced = Counter(row.how for row in ran)
    budgets = Counter(row.under_budget.split()[0] if row.under_budget else "not run" for row in ran)
    return (
        f"{len(ran)} models ran in plain PyTorch, {len(rows) - len(ran)} did not or are missing; "
        f"trained: {dict(counts)}; traced: {dict(traced)}; in half of the memory: {dict(budgets)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=Path("models.jsonl"))
    parser.add_argument("--only", default="", help="models whose package and name contain this")
    parser.add_argument(
        "--path", type=Path, action="append", default=[], help="folder of checkouts"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--without-budgets", action="store_true")
    parser.add_argument("--table", action="store_true", help="print rows as a table")
    options = parser.parse_args()
    sys.path[:0] = [str(path) for path in options.path]
    manifest = tomllib.loads(Path(__file__).with_name("manifest.toml").read_text())
    rows: dict[str, Row] = {}
    if options.rows.exists():
        for line in options.rows.read_text().splitlines():
            row = Row(**json.loads(line))
            rows[row.name] = row
    torch.set_num_threads(1)
    ends = time.monotonic() + options.seconds
    with options.rows.open("a") as file:
        for name, make in subjects(manifest, options.only):
            if name in rows or time.monotonic() > ends:
                continue
            rows[name] = row = isolated(name, make, budgets=not options.without_budgets)
            file.write(json.dumps(row._asdict()) + "\n")
            file.flush()
            if row.result not in ("equal", "missing") or row.under_budget not in ("equal", ""):
                print(*row, flush=True)
    if options.table:
        print(table(list(rows.values())))
    print(summary(list(rows.values())))


if __name__ == "__main__":
    main()
