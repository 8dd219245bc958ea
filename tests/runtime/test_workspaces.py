"""What kernels take beside their results, measured by calls on a processor in place of a GPU."""

import pytest
import torch
from runtime.budget_loops import CPU
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hocket.runtime.offload import kernel_workspaces as workspaces
from hocket.runtime.offload.kernel_workspaces import Workspaces
from hocket.runtime.offload.memory_tracker import MemoryTracker

ATEN = torch.ops.aten


@pytest.fixture
def calls(monkeypatch):
    """Workspaces of which each call takes 1000 bytes, and the results of the calls."""
    monkeypatch.setattr(workspaces, "_MIN_BYTES", 0)
    made = []

    def measure(call):
        made.append(call())
        return 1000

    return Workspaces(CPU, measure), made


def test_each_kind_of_call_is_made_once_whatever_its_numbers_are(calls):
    found, made = calls
    for shape in ((4, 8), (4, 8), (5, 8)):
        left, right = torch.randn(shape), torch.randn(8, 3)
        assert found.workspace_bytes(ATEN.mm.default, (left, right), None) == 1000
    assert [tuple(each.shape) for each in made] == [(4, 3), (5, 3)]
    assert not any(each.any() for each in made), "it is made on zeros"
    turned = torch.randn(8, 4).t()
    found.workspace_bytes(ATEN.mm.default, (turned, torch.randn(8, 3)), {})
    assert len(made) == 3, "another layout may have another kernel"


def test_calls_that_change_draw_or_look_up_something_are_not_made(calls):
    found, made = calls
    x, rows = torch.rand(4, 4), torch.arange(4)
    for func, args in (
        (ATEN.add_.Tensor, (x, x)), (ATEN.add.Tensor, (x, x)), (ATEN.view.default, (x, [16])),
        (ATEN.multinomial.default, (x, 1)), (ATEN.bernoulli.default, (x,)),
        (ATEN.index_select.default, (x, 0, rows)), (ATEN._assert_async.default, (x,)),
    ):  # fmt: skip
        assert found.workspace_bytes(func, args, None) == 0
    assert not made
    given = (torch.randn(4, 2), rows, 9, -1, False)
    assert found.workspace_bytes(ATEN.embedding_dense_backward.default, given, None) == 1000


def test_small_calls_are_not_made():
    found = Workspaces(CPU, lambda call: pytest.fail("made"))
    assert found.workspace_bytes(ATEN.mm.default, (torch.ones(4, 4), torch.ones(4, 4)), None) == 0


def test_a_call_that_fails_takes_nothing_and_is_noted(monkeypatch):
    monkeypatch.setattr(workspaces, "_MIN_BYTES", 0)

    def measure(call):
        raise torch.OutOfMemoryError("no room")

    found = Workspaces(CPU, measure)
    assert found.workspace_bytes(ATEN.mm.default, (torch.ones(4, 4), torch.ones(4, 4)), None) == 0
    assert found.unknown == {"mm": "no room"}


def test_the_call_of_an_expanded_tensor_is_made_on_one_like_it(calls):
    found, made = calls
    rows = torch.ones(4, 1).expand(4, 8)
    assert found.workspace_bytes(ATEN.sum.dim_IntList, (rows, [0]), None) == 1000
    assert tuple(made[0].shape) == (8,)


class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 40, 3, stride=2),
            nn.ReLU(), nn.Flatten(), nn.LazyLinear(10),
        )  # fmt: skip

    def forward(self, images):
        return self.body(images).square().mean()


def test_a_step_with_what_kernels_take_holds_what_the_allocator_gave(allocations, monkeypatch):
    """Rehearsed on tensors without memory; each kernel's share is measured by a call of its own."""
    monkeypatch.setattr(workspaces, "_MIN_BYTES", 0)
    torch.manual_seed(0)
    model, images = Picture(), torch.randn(4, 3, 33, 33)
    model(images)

    def measure(call):
        kept = []
        noted = allocations(lambda: kept.append(call()), CPU)
        return noted.peak(with_temporaries=True).held_bytes - noted.end_bytes

    real = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tracker, mode = (
        MemoryTracker(workspace=Workspaces(CPU, measure).workspace_bytes),
        FakeTensorMode(),
    )
    with mode, tracker:
        fake = {name: mode.from_tensor(tensor) for name, tensor in real.items()}
        given = mode.from_tensor(images)
        tracker.track([given, *fake.values()])
        torch.func.functional_call(model, fake, (given,)).backward()
    noted = allocations(lambda: model(images).backward(), CPU, [images, *real.values()])
    assert tracker.peak_bytes == noted.peak(with_temporaries=True).held_bytes
    assert tracker.peak_bytes > noted.peak(with_temporaries=False).held_bytes
