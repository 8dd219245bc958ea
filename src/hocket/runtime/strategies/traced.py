"""Strategy that runs traced steps in place of the model's code.

The planned step is traced first; steps of other batches are traced on demand and placed like it.
Traced steps are cached by everything that a trace depends on and that may change between steps:
shapes and constants of the batch, training modes of modules, frozen parameters, settings of
modules, and the dtype of autocast. If a batch cannot be traced, or there are too many shapes, the
model's own code computes the step (`EagerModel`). ``torch.compile`` is not used, because it fuses
ops and guards its graphs by itself: a plan could neither place nor order single ops, nor cut a step
into stages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hocket.base.errors import RunError, UsageError
from hocket.capture.fake import plain_batch
from hocket.capture.model import CaptureWarning
from hocket.capture.packed import mask_facts
from hocket.capture.perform import generator_of
from hocket.capture.program import Program
from hocket.capture.trouble import UntraceableError
from hocket.plan.plan import Plan
from hocket.runtime.batches import (
    Signature,
    require_alike,
    settled,
    shapes_text,
    signature_of,
)
from hocket.runtime.collectives.gradient_reducer import GradientReducer
from hocket.runtime.eager_step import EagerStep, ReplayedStep
from hocket.runtime.model_tensors import (
    ModelTensors,
    ModelTree,
    replaced_error,
    setting_values,
    settings_of,
)
from hocket.runtime.replay import ReplayedUpdate, eager, never_replayed, with_update
from hocket.runtime.step_record import StepRecord, measured_timeline
from hocket.runtime.strategies.eager import EagerModel
from hocket.runtime.strategy import StepOutput, Strategy, Timings, TrainingTask
from hocket.runtime.trace_options import Kind, Weight, autocast_state
from hocket.runtime.traced_step import PlacedProgram, TracedStep, placement_like, with_graph


class StateSnapshot:
    """Copy of the state that a step may change before it fails: generator and written tensors."""

    def __init__(
        self, program: Program, given: Sequence[Mapping[int, torch.Tensor]], device: torch.device
    ) -> None:
        self._device = device
        self._drawn = generator_of(device).get_state()
        written = {program.tensors[t].storage for call in program.calls for t in call.targets}
        self._tensors = [
            (tensor, tensor.clone())
            for tensors in given
            for number, tensor in tensors.items()
            if program.tensors[number].storage in written
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore generator and tensors."""
        generator_of(self._device).set_state(self._drawn)
        for tensor, before in self._tensors:
            tensor.copy_(before)


class ManyShapesError(UsageError):
    """Batches have more shapes than the limit of traced steps."""

    code = "many-shapes"


class TracedModel(Strategy):
    """Strategy that runs traced steps in place of the model."""

    is_ranked = False
    """True if each rank runs the ops of one device."""

    def __init__(self, task: TrainingTask, placed: PlacedProgram) -> None:
        """``placed`` is the planned step, traced for the task's batch."""
        self._model, self._recipe, self._options = task.model, task.recipe, task.options
        self.problem, self.plan, _, self.devices = placed
        self.replay = task.options.replay
        self._held = ModelTensors(task.model)
        self._look_at_model()
        self.tensors: Mapping[str, torch.Tensor] = self._held.tensors
        self._planned = signature_of(task.batch)
        self.first = self._ready(placed)
        used = set(np.asarray(self.first.setup.device_of).tolist())
        kinds = self.problem.cluster.devices
        # A prediction for GPUs says nothing about a CPU that stands in for them, or vice versa.
        are_real = all(kinds[d].kind.is_cpu == (self.devices[d].type == "cpu") for d in used)
        self.predicted_s = self.first.predicted.makespan_s if are_real else None
        self._recorded = {self._key("train", self._planned, mask_facts(task.batch)): self.first}
        self._untraceable: dict[tuple[Any, ...], UntraceableError] = {}
        self._warned: set[str] = set()
        self._reducer: GradientReducer | None = None
        self._update = task.recipe.make_update
        is_on_cuda = {device.type for device in self.devices} == {"cuda"}
        if task.recipe.calls_optimizer and self.replay and is_on_cuda:
            self._update = ReplayedUpdate()

    @property
    def replays(self) -> str:
        """Description of how steps of the planned shape are launched."""
        if isinstance(self.first.runner, ReplayedStep):
            if self._reducer is not None and self._reducer.overlaps:
                return eager("gradients are summed while the backward pass runs")
            return with_update(self.first.runner.replay.message, self._update)
        if not self.first.is_on_one_device:
            return eager("several devices or ranks run a step")
        return never_replayed(self.devices[0])

    @property
    def record(self) -> StepRecord | None:
        """Times of the last step on this rank's device; None if ranks do not place ops."""
        return None

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def train(self, batch: Any, step: int, weight: Weight) -> StepOutput:
        """Run forward and backward of a batch, by a traced step if possible."""
        recorded, batch = self._found("train", batch)
        if recorded is None:
            return self._called.train(batch, step, weight)
        self._hand_over(recorded)
        if isinstance(recorded.runner, ReplayedStep) and recorded.runner.lends:
            self._keep_lent()
        given = self.given(recorded, batch)
        before = self._state_before(recorded, given)
        try:
            recorded.runner.run(given, step, weight)
        except RunError as error:
            self._give_up(recorded, before, error)
            return self._called.train(batch, step, weight)
        recorded.has_run = True
        return self._taken(recorded)

    def timed(self, batch: Any, step: int, weight: Weight) -> tuple[StepOutput, Timings | None]:
        """Run a training step with every op timed; with ranks the step is not timed."""
        recorded, batch = self._found("train", batch)
        if recorded is None or self.is_ranked:
            return self.train(batch, step, weight), None
        usual, recorded.runner = recorded.runner, recorded.timed()
        try:
            output = self.train(batch, step, weight)
            record = recorded.runner.record
        finally:
            recorded.runner = usual
        if record is None:
            # The traced step failed, and the model itself has computed the step.
            return output, None
        setup, problem = recorded.setup, recorded.problem
        measured = measured_timeline(
            record, np.array(setup.device_of, dtype=np.int32), setup.split.transfers,
            len(problem.cluster.devices),
        )  # fmt: skip
        return output, Timings(problem, recorded.plan, recorded.predicted, measured)

    def forward(self, batch: Any, step: int) -> StepOutput:
        """Run the forward pass; the backward pass runs with ``loss.backward()``."""
        recorded, batch = self._found("train", batch)
        if recorded is None:
            return self._called.forward(batch, step)
        if not recorded.is_on_one_device:
            return super().forward(batch, step)
        runner: Any = recorded.runner
        self._hand_over(recorded)
        given = self.given(recorded, batch)
        before = self._state_before(recorded, given)
        try:
            runner.forward(given, step)
        except RunError as error:
            self._give_up(recorded, before, error)
            return self._called.forward(batch, step)

        def backward(weight: Weight) -> None:
            try:
                runner.backward(weight)
            except RunError as error:
                # Both passes run again, from the state before the traced forward pass.
                self._give_up(recorded, before, error)
                self._called.train(batch, step, weight)
                return
            recorded.has_run = True
            self._add_gradients(recorded)
            runner.forget()

        loss = runner.value(recorded.program.outputs[0])
        # The only input that requires a gradient: it makes autograd call `_Recorded.backward`.
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        attached = _Recorded.apply(anchor, loss, backward)  # type: ignore[no-untyped-call]
        return StepOutput(attached, recorded.returned())

    def evaluate(self, batch: Any) -> StepOutput:
        """Return the loss, without gradients."""
        kept = self._use("evaluate", batch)
        if kept is None:
            return self._called.evaluate(batch)
        return StepOutput(kept["loss"], kept["returned"])

    def predict(self, batch: Any) -> Any:
        """Return the model's outputs in evaluation mode."""
        found = self._use("predict", batch)
        return self._called.predict(batch) if found is None else found

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer."""
        self._update(optimizer)

    def feed(self, reducer: GradientReducer) -> None:
        """Pass gradients to a reducer once they are computed."""
        self._reducer = reducer

    def _hand_over(self, recorded: TracedStep) -> None:
        """Make the next run of a traced step pass gradients to the reducer, if it overlaps."""
        reducer, runner = self._reducer, recorded.runner
        # A replayed step has its gradients only after the replay, when nothing can overlap.
        if reducer is None or not isinstance(runner, EagerStep):
            return
        names = recorded.program.names

        def take(number: int, gradient: torch.Tensor) -> torch.Tensor:
            parameter: Any = self.tensors[names[number]]
            return reducer.take(parameter, gradient.to(parameter.device))

        runner.on_gradient = take if reducer.is_enabled and reducer.overlaps else None

    def _use(self, kind: Kind, batch: Any) -> Any:
        """Return the outputs of a traced step without gradients; None if it cannot be traced."""
        recorded, batch = self._found(kind, batch)
        if recorded is None:
            return None
        given = self.given(recorded, batch)
        before = self._state_before(recorded, given)
        try:
            recorded.runner.run(given, 1)
        except RunError as error:
            self._give_up(recorded, before, error)
            return None
        recorded.has_run = True
        returned = recorded.returned()
        recorded.runner.forget()
        return returned

    def _keep_lent(self) -> None:
        """Clone accumulated gradients before a replay overwrites their memory."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def _taken(self, recorded: TracedStep) -> StepOutput:
        """Add the gradients of a finished step, drop its tensors, and return loss and outputs."""
        loss = recorded.runner.value(recorded.program.outputs[0]).detach()
        outcome = StepOutput(loss, recorded.returned())
        self._add_gradients(recorded)
        recorded.runner.forget()
        return outcome

    @torch.no_grad()
    def _add_gradients(self, recorded: TracedStep) -> None:
        names = recorded.program.names
        for number, gradient in recorded.runner.gradients.items():
            parameter = self.tensors[names[number]]
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.device)
            elif parameter.grad is not gradient:  # else the reducer has taken it
                parameter.grad.add_(gradient.to(parameter.device))

    # ── the model itself, if there is no traced step ─────────────────────────────────────────
    #
    # A kernel's real result may have other strides than the fake tensor in the trace, so that a
    # traced view fails. A traced step that fails in its first run is therefore undone, and the
    # model itself computes the step from the same state.

    def _found(self, kind: Kind, batch: Any) -> tuple[TracedStep | None, Any]:
        """Return the result of `find`, with None instead of a step if the batch is untraceable."""
        try:
            return self.find(kind, batch)
        except (ManyShapesError, UntraceableError) as error:
            if not self.first.is_on_one_device or self._reducer is not None:
                raise
            self._warn(error)
            return None, plain_batch(batch)

    def _state_before(self, recorded: TracedStep, given: Any) -> StateSnapshot | None:
        """Return a snapshot to restore if a step's first run fails; None if it must not fail."""
        # With ranks the others would not fall back, and would wait for this one.
        if recorded.has_run or not recorded.is_on_one_device or self._reducer is not None:
            return None
        return StateSnapshot(recorded.program, given, self.devices[0])

    def _give_up(self, recorded: TracedStep, before: StateSnapshot | None, error: RunError) -> None:
        """Undo a traced step that failed in its first run; later such batches run eagerly."""
        if before is None:
            raise error
        before.restore()
        recorded.runner.forget()
        found = UntraceableError(f"{error.message} (as traced)")
        for key in [key for key, step in self._recorded.items() if step is recorded]:
            del self._recorded[key]
            self._untraceable[key] = found
        self._warn(found)

    def _warn(self, error: UsageError) -> None:
        if error.message not in self._warned:
            self._warned.add(error.message)
            self.lost = (
                f"{error.message}; the model itself computes such batches, with the same numbers; "
                "placement, order and replay of traced steps are lost for them"
            )
            hint = f"; hint: {error.hint}" if error.hint else ""
            warnings.warn(self.lost + hint, CaptureWarning, 6)

    @cached_property
    def _called(self) -> EagerModel:
        self._held.bring(self.devices[0])
        return EagerModel(self._model, self._recipe, self.devices[0])

    def _look_at_model(self) -> None:
        """Record the model's current modules, tensors and settings."""
        model = self._model
        self._tree = ModelTree(model)
        self._modules = list(model.modules())
        self._settings = list(settings_of(self._modules))
        """Plain values of modules, such as a temperature or a dropout, that a loop may change."""
        self._parameters = list(model.parameters())

    def _renew(self) -> None:
        """Adopt the model's present tensors and modules after the user has replaced some."""
        if self.is_ranked or self._reducer is not None:
            raise replaced_error()
        before = self._tree
        self._held.renew()
        self._look_at_model()
        # With equal layouts traced steps stay valid: they get the new addresses in `given`.
        if not self._tree.is_alike(before):
            self._recorded.clear()
            self._untraceable.clear()
        # The cached eager strategy refers to the replaced tensors.
        vars(self).pop("_called", None)

    # ── which traced step ────────────────────────────────────────────────────────────────────

    def given(self, recorded: TracedStep, batch: Any) -> list[dict[int, torch.Tensor]]:
        """Return the tensors that exist before a step, per device of the plan."""
        return recorded.given(self._model, self._held, batch)

    def find(self, kind: Kind, batch: Any) -> tuple[TracedStep, Any]:
        """Return the traced step of a batch, traced now if needed, and the settled batch."""
        if not self._tree.is_same():
            self._renew()
        batch = settled(batch)
        signature = signature_of(batch)
        key = self._key(kind, signature, mask_facts(batch))
        if key in self._untraceable:
            raise self._untraceable[key]
        if key not in self._recorded:
            self._require_known(kind, signature)
            try:
                self._recorded[key] = self._record(kind, batch)
            except UntraceableError as error:
                self._untraceable[key] = error
                raise
        return self._recorded[key], batch

    def _key(self, kind: Kind, signature: Signature, facts: tuple[bool, ...]) -> tuple[Any, ...]:
        # Evaluation and prediction switch all modules to evaluation mode.
        modes = tuple(module.training for module in self._modules) if kind == "train" else ()
        frozen = tuple(parameter.requires_grad for parameter in self._parameters)
        settings = setting_values(self._settings)
        return kind, signature, modes, frozen, autocast_state(), facts, settings

    def _require_known(self, kind: Kind, signature: Signature) -> None:
        """Refuse batches that differ in more than shapes, and more traced steps than the limit."""
        if kind != "predict":
            require_alike(self._planned, signature)
        max_shapes = self._options.max_shapes
        alike = [key for key in self._recorded if key[:2] == (kind, signature)]
        if len({key[-1] for key in alike}) >= max_shapes:
            raise ManyShapesError(
                f"attributes of the model had more than {max_shapes} values",
                hint="hold what changes in a tensor that is a buffer, or raise max_shapes",
            )
        shapes = {key[1] for key in self._recorded if key[0] == kind}
        if signature not in shapes and len(shapes) >= max_shapes:
            raise ManyShapesError(
                f"batches of more than {max_shapes} shapes",
                where=shapes_text(signature),
                hint="fill them up to few shapes with pad=hocket.PadTo(64), drop the last batch, "
                "or raise max_shapes",
            )

    def _record(self, kind: Kind, batch: Any) -> TracedStep:
        graph, program = self._recipe.trace(self._model, batch, kind)
        assert self.plan.device_of is not None
        device_of = placement_like(graph, self.problem.graph, self.plan.device_of)
        plan = Plan(planner=self.plan.planner).placing(device_of)
        placed = PlacedProgram(with_graph(self.problem, graph), plan, program, self.devices)
        return self._ready(placed, everything=kind != "train")

    def _ready(self, placed: PlacedProgram, *, everything: bool = False) -> TracedStep:
        return TracedStep(
            placed, seed=self._options.seed, everything=everything or self._options.outputs,
            replay=self.replay and not everything, is_ranked=self.is_ranked,
        )  # fmt: skip


class _Recorded(torch.autograd.Function):
    """A loss whose backward runs the traced backward pass, which adds gradients to parameters."""

    @staticmethod
    def forward(
        context: Any, anchor: torch.Tensor, loss: torch.Tensor, backward: Callable[[Weight], None]
    ) -> torch.Tensor:
        context.run = backward
        return loss.clone()

    @staticmethod
    def backward(context: Any, weight: torch.Tensor) -> Any:
        context.run(weight)
        return torch.zeros_like(weight).sum(), None, None
