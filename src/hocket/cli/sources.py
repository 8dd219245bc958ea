"""Load what command-line arguments name: graphs, models, clusters, problems and plans.

Also prints the notes that belong to loading: the loss, assumed links, autocast, compilation.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.cli.options import ModelOn, ModelOptions
from hocket.cli.output import say, working

if TYPE_CHECKING:
    from hocket.graph.graph import Graph
    from hocket.hardware.cluster import Cluster
    from hocket.plan.files import SavedPlan
    from hocket.plan.problem import Problem


def refuse_file_alone(text: str) -> None:
    """Refuse a Python file without the name of a function that makes the model."""
    from hocket.base.errors import UsageError

    if text.endswith(".py"):
        raise UsageError(
            f"{text!r} names no function",
            hint=f"write {text}:FUNCTION, one that returns the model and a batch",
        )


TOY_BATCH, TOY_SEQ = 4, 8
"""Small batch and sequence length for trying whether a zoo model's batch can be split."""


def is_graph_file(text: str) -> bool:
    """True if the text names a graph file, false if it names a model."""
    from hocket.base.regular import is_file
    from hocket.transformer.files import is_config_file

    path = Path(text)
    if is_config_file(path):
        return False
    # A colon marks file.py:function, which is a model.
    if is_file(path) and ":" not in path.name:
        return not path.name.endswith(".py")
    return text.endswith((".json", ".json.gz", ".txt", ".txt.gz"))


def recorded_step(text: str) -> Graph | None:
    """Graph of a file that records its batch; None for other files and for names of models."""
    from hocket.graph.files import read_graph

    if not is_graph_file(text) or not Path(text).is_file():
        return None
    graph = read_graph(text)
    return graph if graph.other_batch is not None else None


def load_graph(
    text: str,
    options: ModelOptions,
    *,
    device: str = "accelerator",
    check: bool = False,
    at_sizes: bool = True,
) -> tuple[Graph, Path | None]:
    """Read a graph file or capture a model; return the graph and the file's path (None if
    captured).

    ``check`` tests if the batch can be split: for a model by running its samples separately at toy
    size, for a file by inspecting its ops. ``device`` selects the kernels that are captured. With
    ``at_sizes`` a model is captured at three batch sizes, so that other batches can be predicted.
    """
    if is_graph_file(text):
        from hocket.graph.files import read_graph
        from hocket.graph.meeting import reading_samples

        options.refuse_for_file(text)
        with working(f"reading {text}"):
            graph = read_graph(Path(text))
        if check:
            graph = reading_samples(graph)
            say_unsplit(graph)
        return graph, Path(text)
    return capture_model(text, options, device=device, check=check, at_sizes=at_sizes), None


def build_model(text: str, options: ModelOptions) -> tuple[Any, Any]:
    """Build a model of the zoo or of the user on the meta device, with its batch."""
    refuse_file_alone(text)
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
    """Capture one step of a model of the zoo or of the user.

    See `load_graph` for the parameters.
    """
    refuse_file_alone(text)
    with working(f"capturing {text}"), warnings.catch_warnings(record=True) as caught:
        # build_model imports PyTorch, which takes seconds, hence inside the spinner. Warnings are
        # printed after the spinner has ended.
        from hocket.capture import ZOO, CaptureWarning, capture
        from hocket.capture.given import loss_and_forward
        from hocket.capture.precision import usual_amp
        from hocket.capture.sizes import capture_sizes, trying_samples

        warnings.simplefilter("always", CaptureWarning)
        model, batch = build_model(text, options)
        amp = usual_amp(model, device) if options.amp is None else options.amp_name
        loss, forward = loss_and_forward(model, batch, options.loss, amp, device)
        graph = (capture_sizes if at_sizes else capture)(
            model,
            batch,
            loss=loss,
            optimizer=options.optimizer_name,
            name=text,
            device=device,
            forward=forward,
        )
        if amp is not None:
            graph = replace(graph, meta={**graph.meta, "amp": amp})
        if check and graph.other_batch is not None:
            # A zoo model can be rebuilt at toy size; a user's model is tried with the batch of its
            # factory.
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
    """Print the reason why the batch of a step cannot be split, if there is one."""
    if reason := graph.meta.get("unsplit"):
        say(f"the batch cannot be split: {reason}")


def say_loss(graph: Graph) -> None:
    """Print the loss of a captured step; warn where the model returns none."""
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
    """Cluster of a name or file; None for ``file`` and ``auto``, which are found later.

    Read before the model is captured, so that errors are reported at once.
    """
    from hocket.hardware.shorthand import cluster_from_text
    from hocket.plan.make import ON_FILE, ON_THIS_MACHINE

    return None if on in (ON_FILE, ON_THIS_MACHINE) else cluster_from_text(on)


def make_problem(graph: Graph, request: ModelOn, **settings: Any) -> Problem:
    """Make a problem from a graph and the options of a command."""
    from hocket.cost.calibrate import read_calibration
    from hocket.cost.profile import read_profile
    from hocket.plan import make

    say_joining(request.on)
    return make.make_problem(
        graph,
        request.on,
        profile=read_profile(request.profile) if request.profile else None,
        calibration=read_calibration(request.calibration) if request.calibration else None,
        **settings,
    )


def say_joining(on: str) -> None:
    """Print the links that shorthand such as ``8xh100`` assumes between its devices."""
    from hocket.hardware.shorthand import joining_note

    note = joining_note(on)
    if note is not None:
        say(note)


def load_plan(path: Path, graph_file: Path | None) -> SavedPlan:
    """Read a plan file and the problem that it solves."""
    from hocket.base.errors import UsageError
    from hocket.graph.graph import Graph
    from hocket.plan.files import read_plan

    with working(f"reading {path}"):
        saved = read_plan(path, graph_file=graph_file)
    if graph_file is not None and not isinstance(saved.problem.work, Graph):
        raise UsageError("this plan has no graph", hint="leave out --graph")
    return saved


def announce_compilation(about: int = 1) -> None:
    """Print a note before kernels are compiled, which a fresh installation does once.

    ``about`` is the largest number of kernels that the command may need.
    """
    from hocket.kernels.progress import tell_before_compiling

    num_compiled = 0

    def tell(name: str) -> None:
        nonlocal num_compiled
        if num_compiled == 0:
            # Each command needs other kernels, so another command may announce compilation again.
            some = f"up to {about} of " * (about > 1)
            say(f"compiling {some}this command's kernels for this CPU, once")
        elif num_compiled % 5 == 0 and about > num_compiled:
            say(f"compiled {num_compiled} kernels, up to {about - num_compiled} are left")
        num_compiled += 1

    tell_before_compiling(tell)
