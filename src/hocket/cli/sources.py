"""Values of what the command line names: graphs, clusters, costs, problems."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from hocket.cli.output import say, working

if TYPE_CHECKING:
    from hocket.graph.graph import Graph
    from hocket.hardware.cluster import Cluster
    from hocket.plan.files import SavedPlan
    from hocket.plan.problem import Objective, Problem, TransferMode


# The user's own function that makes a model, checked as text.
#
# A wrong name or parameter is reported before the seconds that importing PyTorch
# and the file take. Whatever the text does not settle is left to the import.

_PARAMETERS = ("batch", "seq", "dtype", "layers")


def refuse_wrong_file(text: str, options: ModelOptions) -> None:
    """Tell of a file that is not there, of a function that is not named or not there, and of an
    option that it has no parameter for."""
    from hocket.base.errors import UsageError, did_you_mean
    from hocket.base.regular import is_file

    file, function = (text, "") if text.endswith(".py") else text.rpartition(":")[::2]
    if not file.endswith(".py"):
        return
    if not is_file(Path(file)):
        raise UsageError(
            f"there is no file {file!r}", hint="write path/file.py:function, and check the path"
        )
    tree = _parsed(Path(file))
    defined = [] if tree is None else [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    names = [each.name for each in defined if not each.name.startswith("_")]
    if not function:
        known = ", ".join(names[:8]) or "it has none yet"
        raise UsageError(
            f"{text!r} names no function",
            hint=f"write {file}:FUNCTION, one that returns the model and a batch ({known})",
        )
    if tree is None:
        return
    if function not in _bound(tree) and not _binds_unseen(tree):
        raise UsageError(
            f"{file!r} has no function {function!r}", hint=did_you_mean(function, names)
        )
    found = [each for each in defined if each.name == function]
    if len(found) == 1 and not found[0].decorator_list and found[0].args.kwarg is None:
        _refuse_options(found[0], options)


def _refuse_options(function: ast.FunctionDef, options: ModelOptions) -> None:
    from hocket.base.errors import UsageError

    named = {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
    for key in _PARAMETERS:
        if getattr(options, key) is not None and key not in named:
            raise UsageError(
                f"{function.name!r} has no parameter {key!r}",
                hint=f"add {key!r} to its parameters or leave the option out",
            )


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return None


def _bound(tree: ast.Module) -> set[str]:
    """Every name that some line of the file gives a meaning."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name.partition(".")[0])
    return found


def _binds_unseen(tree: ast.Module) -> bool:
    """True if names may come from elsewhere: ``from … import *``, ``__getattr__``, ``globals()``,
    ``exec``."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    bound = _bound(tree)
    return bool({"*", "__getattr__"} & bound or {"globals", "vars", "exec", "setattr"} & used)


F = TypeVar("F", bound=Callable[..., Any])
TOY_BATCH, TOY_SEQ = 4, 8
"""Sizes at which a model of the zoo is tried."""


@dataclass(frozen=True)
class ModelOptions:
    """Options of a model that is captured; None leaves them to the model."""

    batch: int | None
    seq: int | None
    dtype: str | None
    optimizer: str | None
    loss: str | None = None
    layers: int | None = None
    amp: str | None = None

    def having(self, name: str, value: int) -> ModelOptions:
        """The options with another batch, sequence length or number of layers."""
        changed: dict[str, Any] = {name: value}
        return replace(self, **changed)

    @property
    def optimizer_name(self) -> str | None:
        """The optimizer as `hocket.capture` takes it: None for inference."""
        return None if self.optimizer == "none" else self.optimizer or "adamw"

    @property
    def amp_name(self) -> str | None:
        """The autocast that was asked for; None for none."""
        return None if self.amp == "none" else self.amp

    def refuse_for_file(self, text: str) -> None:
        """A graph file is what it is: options that would change the model are a mistake."""
        from hocket.base.errors import UsageError

        for name, value in vars(self).items():
            if value is not None:
                raise UsageError(
                    f"--{name} has no effect on the graph file {text!r}",
                    hint=f"leave it out, or capture the model again with --{name} {value}",
                )


_OPTIMIZERS = (
    "adamw", "adam", "sgd", "sgd-momentum", "adadelta", "adafactor", "adagrad", "adamax", "asgd",
    "muon", "nadam", "radam", "rmsprop", "rprop", "none",
)  # fmt: skip
"""A list of its own, because the one of capture imports PyTorch; a test compares them."""


def model_options(command: F) -> F:
    """The options that say how a model is built and what step is captured, as ``options``."""

    @wraps(command)
    def collected(
        *args: Any,
        batch: int | None,
        seq: int | None,
        dtype: str | None,
        optimizer: str | None,
        loss: str | None,
        amp: str | None,
        **others: Any,
    ) -> Any:
        options = ModelOptions(batch, seq, dtype, optimizer, loss, amp=amp)
        return command(*args, options=options, **others)

    named = (
        click.option(
            "--optimizer",
            type=click.Choice(_OPTIMIZERS),
            metavar="NAME",
            help="The step's optimizer: adamw, adam, sgd, sgd-momentum or another class of "
            "torch.optim in lower case; 'none' captures inference. [default: adamw]",
        ),
        click.option(
            "--loss",
            metavar="NAME_OR_FUNCTION",
            help="What to minimise: cross-entropy, mse or mean of the model's output (for a batch "
            "(x, y): against y), or package.module:function of it. [default: the loss that the "
            "model returns]",
        ),
        click.option(
            "--dtype",
            type=click.Choice(["float32", "bfloat16", "float16"]),
            help="Type of the parameters. [default: the model's]",
        ),
        click.option(
            "--amp",
            type=click.Choice(["bf16", "fp16", "none"]),
            help="Mixed precision: autocast of this type over the parameters' own. [default: bf16 "
            "for float32 models of 1 B parameters and more on accelerators, else none]",
        ),
        click.option(
            "--seq",
            type=click.IntRange(1, 2**20),
            help="Sequence length, for models that have one. [default: the model's]",
        ),
        click.option(
            "--batch",
            type=click.IntRange(1, 2**20),
            help="Samples in one step. [default: the model's]",
        ),
    )
    found = cast(F, collected)
    for option in named:
        found = option(found)
    return found


def cost_options(command: F) -> F:
    """The options that name files with measured costs: ``profile`` and ``calibration``."""
    named = (
        ("--calibration", "Fitted efficiencies from hocket calibrate."),
        ("--profile", "Measured op times from hocket profile."),
    )
    for name, help_text in named:
        command = click.option(name, type=click.Path(path_type=Path), help=help_text)(command)
    return command


def size_option_value(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """The value of an option that takes a size."""
    from hocket.base.units import parse_bytes

    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def budget_options(
    *, metavar: str, devices: str, memory: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options ``on``, whose help begins with which ``devices`` are meant, and
    ``memory_bytes``."""

    def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option(
            "--memory", "memory_bytes", default=None, callback=size_option_value,
            metavar="SIZE", help=memory,
        )(command)  # fmt: skip
        return click.option(
            "--on", required=True, metavar=metavar,
            help=f"{devices}: shorthand such as 1xh200, a preset or a TOML file.",
        )(command)  # fmt: skip

    return with_options


def is_graph_file(text: str) -> bool:
    """True if a name means a graph file rather than a model."""
    from hocket.base.regular import is_file
    from hocket.transformer.files import is_config_file

    path = Path(text)
    if is_config_file(path):
        return False
    if is_file(path) and ":" not in path.name:
        return not path.name.endswith(".py")
    return text.endswith((".json", ".json.gz", ".txt", ".txt.gz"))


def load_graph(
    text: str,
    options: ModelOptions,
    *,
    device: str = "accelerator",
    check: bool = False,
    at_sizes: bool = True,
) -> tuple[Graph, Path | None]:
    """The graph that a file holds, or that a model is captured to (then without a path).

    With ``check`` the model's samples are taken apart at toy size; of a file its ops are looked at.
    A model is captured with the kernels of a ``device``, at three sizes of its batch, or once where
    ``at_sizes`` is false.
    """
    if is_graph_file(text):
        from hocket.api.graphs import read_graph, reading_samples

        options.refuse_for_file(text)
        with working(f"reading {text}"):
            graph = read_graph(Path(text))
        if check:
            graph = reading_samples(graph)
            say_unsplit(graph)
        return graph, Path(text)
    return capture_model(text, options, device=device, check=check, at_sizes=at_sizes), None


def build_model(text: str, options: ModelOptions) -> tuple[Any, Any]:
    """A model of the zoo or of the user, and its batch."""
    refuse_wrong_file(text, options)
    from hocket.capture import load_model

    return load_model(
        text,
        batch=options.batch,
        seq=options.seq,
        dtype=options.dtype,
        layers=options.layers,
        device="meta",
    )


def capture_model(
    text: str,
    options: ModelOptions,
    *,
    device: str = "accelerator",
    check: bool = False,
    at_sizes: bool = True,
) -> Graph:
    """Capture one step of a model of the zoo or of the user, at several sizes of its batch."""
    refuse_wrong_file(text, options)
    with working(f"capturing {text}"), warnings.catch_warnings(record=True) as caught:
        # Imports PyTorch, which takes seconds, on a busy machine many.
        from hocket.capture import ZOO, CaptureWarning, capture
        from hocket.capture.precision import amp_forward, usual_amp
        from hocket.capture.sizes import capture_sizes, trying_samples

        warnings.simplefilter("always", CaptureWarning)
        model, batch = build_model(text, options)
        amp = usual_amp(model, device) if options.amp is None else options.amp_name
        graph = (capture_sizes if at_sizes else capture)(
            model,
            batch,
            loss=options.loss,
            optimizer=options.optimizer_name,
            name=text,
            device=device,
            forward=amp_forward(amp, device),
        )
        if amp is not None:
            graph = replace(graph, meta={**graph.meta, "amp": amp})
        if check and graph.other_batch is not None:
            if text in ZOO:
                model, batch = build_model(text, replace(options, batch=TOY_BATCH, seq=TOY_SEQ))
            graph = trying_samples(graph, model, batch, loss=options.loss)
    if amp is not None and options.amp is None:
        say(
            f"planned under {amp} autocast, as models of this size are trained; --amp none: float32"
        )
    say_loss(graph)
    if check:
        say_unsplit(graph)
    for warning in caught:
        if issubclass(warning.category, CaptureWarning):
            say(f"warning: {warning.message}")
    return graph


def say_unsplit(graph: Graph) -> None:
    """Say why the batch of a step cannot be split, where it cannot."""
    if reason := graph.meta.get("unsplit"):
        say(f"the batch cannot be split: {reason}")


def say_loss(graph: Graph) -> None:
    """Say what a captured step minimises, with a warning where the model does not say it."""
    from hocket.capture.loss import MEAN, OWN, describe_loss

    loss = graph.meta.get("loss")
    if loss == MEAN:
        say(
            f"warning: the step minimises {describe_loss(loss)}: losses mean nothing, and one that "
            "keeps more, as cross-entropy does, takes more memory; name yours with --loss"
        )
    elif isinstance(loss, str) and loss != OWN:
        say(f"minimised: {describe_loss(loss)}")


def named_cluster(on: str) -> Cluster | None:
    """The cluster of a name or file, read before the model is captured so that errors come at once;
    None where it is found later (a graph's own, this machine)."""
    from hocket.api import ON_FILE, ON_THIS_MACHINE
    from hocket.api.clusters import cluster_from_text

    return None if on in (ON_FILE, ON_THIS_MACHINE) else cluster_from_text(on)


def make_problem(
    graph: Graph,
    on: str,
    transfers: TransferMode,
    profile: Path | None,
    calibration: Path | None,
    objective: Objective = "latency",
    contiguous: bool = False,
    headroom_bytes: int | None = None,
) -> Problem:
    """A problem from a graph and the texts of the options."""
    from hocket import api
    from hocket.cost.calibrate import read_calibration
    from hocket.cost.profile import read_profile

    say_joining(on)
    return api.make_problem(
        graph,
        on,
        transfers=transfers,
        objective=objective,
        contiguous=contiguous,
        headroom_bytes=headroom_bytes,
        profile=read_profile(profile) if profile else None,
        calibration=read_calibration(calibration) if calibration else None,
    )


def say_joining(on: str) -> None:
    """Say what shorthand such as ``8xh100`` takes to join its devices."""
    from hocket.api.clusters import joining_note

    note = joining_note(on)
    if note is not None:
        say(note)


def load_plan(path: Path, graph_file: Path | None) -> SavedPlan:
    """A plan file with the problem that it answers."""
    from hocket.api.graphs import Graph
    from hocket.base.errors import UsageError
    from hocket.plan.files import read_plan

    with working(f"reading {path}"):
        saved = read_plan(path, graph_file=graph_file)
    if graph_file is not None and not isinstance(saved.problem.work, Graph):
        raise UsageError("this plan has no graph", hint="leave out --graph")
    return saved


def announce_compilation(about: int = 1) -> None:
    """Say what is left when a fresh installation has to compile kernels first, so many at most."""
    from hocket.kernels.progress import tell_before_compiling

    num_compiled = 0

    def tell(name: str) -> None:
        nonlocal num_compiled
        if num_compiled == 0:
            # Each command has its own, so that another one says so again.
            some = f"up to {about} of " * (about > 1)
            say(f"compiling {some}this command's kernels for this CPU, once")
        elif num_compiled % 5 == 0 and about > num_compiled:
            say(f"compiled {num_compiled} kernels, up to {about - num_compiled} are left")
        num_compiled += 1

    tell_before_compiling(tell)


def plan_arguments(command: F) -> F:
    """The argument and option of commands that read a plan."""
    graph = click.option(
        "--graph", "graph_file", type=click.Path(path_type=Path), default=None,
        help="The plan's graph, where its file was moved.",
    )  # fmt: skip
    plan = click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
    return plan(graph(command))
