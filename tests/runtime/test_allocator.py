"""Settings of PyTorch's caching allocator for a training within a budget."""

import pytest
import torch

from hocket.runtime.offload import allocator

GPU = torch.device("cuda")


@pytest.fixture
def settings(monkeypatch):
    """What a machine with a GPU would be told."""
    given = []
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(allocator, "_set", given.append)
    monkeypatch.setattr(allocator, "_are_expandable", lambda device: True)
    for name in allocator._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return given


def test_other_settings_of_the_user_stay(settings, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert allocator.expand_segments(GPU) == ""
    assert settings == ["max_split_size_mb:64,expandable_segments:True"]


def test_a_user_who_has_set_it_is_followed(settings, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert allocator.expand_segments(GPU) == ""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert "PYTORCH_ALLOC_CONF" in allocator.expand_segments(GPU)
    assert settings == []


def test_reasons_are_told_where_it_is_not_possible(settings, monkeypatch):
    monkeypatch.setattr(allocator, "_are_expandable", lambda device: False)
    assert "driver" in allocator.expand_segments(GPU)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert "cudaMallocAsync" in allocator.expand_segments(GPU)


def test_a_processor_has_neither_context_nor_gaps():
    cpu = torch.device("cpu")
    assert allocator.expand_segments(cpu) == ""
    assert allocator.card_bytes(cpu, 1000) == 1000


def test_a_card_must_have_more_than_is_allocated(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * 2**30, 8 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * 2**29)
    assert allocator.context_bytes(GPU) == 2**29
    assert allocator.card_bytes(GPU, 2**30) > 2**30 + 2**29
