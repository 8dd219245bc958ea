"""What capture takes and refuses, and that it always gives the same."""

import os
import subprocess
import sys
import threading
from collections import OrderedDict, UserDict
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest
import torch
from capture.captured_models import ops_of, tensors_with
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture import capture, capture_program, load_model
from hocket.graph import Phase, Role, write_graph


def test_capture_is_the_same_twice():
    model, batch = load_model("mlp")
    assert capture(model, batch).content_hash == capture(model, batch).content_hash


def test_capture_is_the_same_in_another_process():
    code = (
        "from hocket.capture import capture, load_model; "
        "print(capture(*load_model('resnet50', batch=1)).content_hash)"
    )
    # Python orders sets by the seed of its hashes.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert other.stdout.strip() == capture(*load_model("resnet50", batch=1)).content_hash


class Beside(nn.Module):
    """While it computes, what ``meanwhile`` begins goes on."""

    def __init__(self, meanwhile):
        super().__init__()
        self.layer, self._meanwhile = nn.Linear(4, 4), meanwhile

    def forward(self, x):
        with self._meanwhile():
            x = self.layer(x)
        return nn.functional.dropout(x.tanh()).mean()


class Waiting(nn.Module):
    """Draws the same numbers again, and waits in the midst of that."""

    def __init__(self):
        super().__init__()
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def forward(self):
        torch.set_rng_state(torch.get_rng_state())
        self.has_begun.set()
        self.may_end.wait()


def test_capture_does_not_see_what_other_threads_do():
    @contextmanager
    def training():
        waiting = Waiting()
        thread = threading.Thread(target=waiting)
        thread.start()
        waiting.has_begun.wait()
        yield
        waiting.may_end.set()
        thread.join()

    @contextmanager
    def nothing():
        yield

    graphs = []
    for meanwhile in (nothing, training):
        graph, program = capture_program(Beside(meanwhile), torch.ones(2, 4))
        assert program.unseen == ""
        graphs.append(graph)
    assert graphs[0].op_names == graphs[1].op_names
    assert graphs[0].content_hash == graphs[1].content_hash


def test_two_captures_in_two_threads_leave_nothing_behind():
    setter, both = torch.manual_seed, threading.Barrier(2)

    @contextmanager
    def together():
        # One of them has to wait for the other.
        with pytest.raises(threading.BrokenBarrierError):
            both.wait(0.2)
        yield

    hashes = []
    threads = [
        threading.Thread(
            target=lambda: hashes.append(capture(Beside(together), torch.ones(2, 4)).content_hash)
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(hashes) == 2
    assert len(set(hashes)) == 1
    assert torch.manual_seed is setter


def test_capture_inference_has_forward_ops_and_all_outputs():
    class Two(nn.Module):
        def forward(self, x):
            return {"a": x + 1, "b": [x * 2]}

    graph = capture(Two(), {"x": torch.randn(3)}, optimizer=None)
    assert np.all(graph.op_phase == Phase.FORWARD)
    assert tensors_with(graph, Role.OUTPUT) == ["add", "mul"]
    assert tensors_with(graph, Role.INPUT) == ["x"]


def test_capture_takes_positional_batches_and_a_loss():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, scale):
            return self.layer(x) * scale

    batch = (torch.randn(2, 4), torch.randn(4))
    graph, program = capture_program(Pair(), batch, loss=lambda output: output.square().sum())
    assert list(program.inputs) == ["input.0", "input.1"]
    assert len(ops_of(graph, "aten.sum")) >= 1


def test_capture_ignores_frozen_parameters_in_updates():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    graph = capture(model, torch.randn(2, 4))
    updated = [graph.op_names[op] for op in ops_of(graph, "optimizer.adamw")]
    assert updated == ["1.weight/adamw", "1.bias/adamw"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "adamx"}, "unknown optimizer 'adamx'"),
        ({"device": "gpu"}, "no device 'gpu'"),
        ({"loss": lambda output: output}, "one element"),
        ({"loss": lambda output: output.detach().sum()}, "does not depend on any parameter"),
    ],
)
def test_capture_refuses_bad_arguments_with_a_hint(arguments, message):
    with pytest.raises(UsageError, match=message) as caught:
        capture(nn.Linear(4, 4), torch.randn(2, 4), **arguments)
    assert caught.value.hint


def test_capture_refuses_what_is_not_a_module_or_a_batch():
    with pytest.raises(UsageError, match=r"not a torch\.nn\.Module"):
        capture(lambda x: x, torch.randn(2))
    with pytest.raises(UsageError, match="batch cannot be of type 'str'"):
        capture(nn.Linear(2, 2), "images")


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, y):
        return self.layer(x.x if isinstance(x, Point) else x) + y


def test_capture_takes_every_kind_of_batch():
    model, x, y = TwoInputs(), torch.randn(2, 4), torch.randn(2, 4)
    by_position = capture(model, (x, y))
    assert capture(model, Point(x, y)).content_hash == by_position.content_hash
    assert capture(model, [x, y]).content_hash == by_position.content_hash
    by_name = capture(model, {"x": x, "y": y})
    assert capture(model, UserDict(x=x, y=y)).content_hash == by_name.content_hash
    assert capture(model, (Point(x, y), y)).num_ops == by_position.num_ops
    with pytest.raises(UsageError, match="a batch cannot be of type 'int'"):
        capture(model, 3)


def test_capture_of_the_same_model_gives_the_same_file(tmp_path):
    for name in ("one", "other"):
        write_graph(capture(*load_model("mlp")), tmp_path / f"{name}.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "other.json").read_bytes()


@pytest.mark.parametrize("device", ["cuda", "xpu", "gpu", "meta"])
def test_capture_refuses_a_device_that_torch_is_not_built_for(device):
    built_for = torch.accelerator.current_accelerator()
    if built_for is not None and built_for.type == device:
        pytest.skip(f"this build of torch has {device}")
    with pytest.raises(UsageError, match=f"this build of PyTorch has no device '{device}'"):
        capture(*load_model("mlp"), device=device)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this build of torch has cuda")
def test_capture_command_refuses_cuda_with_exit_code_2(tmp_path):
    # In a process of its own: torch aborts where it meets a device that it is not built for.
    command = [sys.executable, "-m", "hocket", "capture", "mlp", "--device", "cuda",
               "-o", str(tmp_path / "graph.json")]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert "this build of PyTorch has no device 'cuda'" in result.stderr


class MakingEntries(OrderedDict):
    """Creates a module for each lookup, as transformers' ACT2FN does."""

    made = 0

    def __getitem__(self, key):
        MakingEntries.made += 1
        return super().__getitem__(key)()


ACTIVATIONS = MakingEntries(relu=torch.nn.ReLU, gelu=torch.nn.GELU)


class ByName(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.name = "relu"

    def forward(self, x):
        return self.first(x).relu().sum() if "relu" in ACTIVATIONS else x.sum()


def test_capture_does_not_look_entries_of_the_users_mappings_up():
    before = MakingEntries.made
    capture(ByName(), torch.randn(3, 4))
    assert MakingEntries.made == before
    assert dict.__getitem__(ACTIVATIONS, "gelu") is torch.nn.GELU
