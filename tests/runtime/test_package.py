"""Tensors survive the way as bytes, with their values and the order of their dimensions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.capture.program import TensorSpec
from hocket.capture.record import layout_of
from hocket.graph import Role
from hocket.runtime.placed_step import HeldTensors
from hocket.runtime.tensor_bytes import pack, package_bytes, unpack

DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64)


def spec_of(tensor):
    size = tensor.untyped_storage().nbytes()
    return TensorSpec(layout_of(tensor), 0, size, Role.ACTIVATION, -1, 0)


@st.composite
def views(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = int(torch.tensor(shape).prod()) if shape else 1
    tensor = torch.arange(count).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    for _ in range(draw(st.integers(0, 4))):
        change = draw(st.sampled_from(["permute", "slice", "expand", "select"]))
        if change == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        elif change == "slice" and tensor.dim() and tensor.shape[-1]:
            start = draw(st.integers(0, tensor.shape[-1] - 1))
            tensor = tensor[..., start :: draw(st.integers(1, 2))]
        elif change == "select" and tensor.dim() and tensor.shape[0]:
            tensor = tensor[draw(st.integers(0, tensor.shape[0] - 1))]
        elif change == "expand":
            tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor


@given(views())
@settings(derandomize=True, deadline=None, max_examples=300)
def test_what_arrives_is_what_was_sent(tensor):
    spec = spec_of(tensor)
    data = pack(tensor, spec, whole=False)
    assert data.dtype == torch.uint8
    assert data.numel() == package_bytes(spec, whole=False) <= max(spec.layout.size_bytes, 1)
    arrived = unpack(data.clone(), spec, whole=False)
    assert arrived.dtype == tensor.dtype
    assert torch.equal(arrived, tensor)
    order = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
    by_stride = sorted(order, key=lambda dim: -tensor.stride(dim))
    assert by_stride == sorted(order, key=lambda dim: -arrived.stride(dim))


@given(views())
@settings(derandomize=True, deadline=None, max_examples=100)
def test_a_whole_storage_arrives_with_the_same_address(tensor):
    spec = spec_of(tensor)
    arrived = unpack(pack(tensor, spec, whole=True).clone(), spec, whole=True)
    assert torch.equal(arrived, tensor)
    assert layout_of(arrived) == layout_of(tensor)
    assert arrived.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("tensor", "keeps"),
    [
        (torch.randn(4, 6)[:, :4], True),
        (torch.randn(4, 60)[:, :4], False),
        (torch.randn(2, 3, 4).transpose(0, 2), True),
        (torch.randn(3).expand(5, 3), True),
    ],
)
def test_strides_are_kept_where_that_wastes_little(tensor, keeps):
    spec = spec_of(tensor)
    arrived = unpack(pack(tensor, spec, whole=False), spec, whole=False)
    assert (arrived.stride() == tensor.stride()) == keeps


def test_pending_conjugation_is_carried_out():
    tensor = torch.tensor([1 + 2j, 3 - 1j]).conj()
    spec = spec_of(tensor)
    assert torch.equal(unpack(pack(tensor, spec, whole=False), spec, whole=False), tensor)


def test_held_counts_each_storage_once():
    held = HeldTensors()
    base = torch.zeros(10)
    held[0], held[1] = base, base[2:]
    assert held.num_bytes == 40
    del held[0]
    assert held.num_bytes == 40
    held[2] = torch.zeros(5)
    assert held.num_bytes == held.peak_bytes == 60
    del held[1]
    held[2] = torch.zeros(1)
    assert held.num_bytes == 4
    assert held.peak_bytes == 60
