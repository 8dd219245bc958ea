"""Storages that autograd saves: each is offloaded once, freed and fetched again."""

import pytest
import torch

from hocket.runtime.offload.copy_streams import CopyStreams, HostPool
from hocket.runtime.offload.memory_tracker import MemoryTracker
from hocket.runtime.offload.saved_tensors import OffloadedStorages, StepStorages

CPU = torch.device("cpu")
SIZE = 1024
"""Numbers of a storage, 4 KiB."""


class Counted(CopyStreams):
    """Copies, and notes what was sent and fetched, in bytes."""

    def __init__(self):
        super().__init__(CPU, is_real=False)
        self.sent, self.fetched = [], []

    def offload(self, pairs):
        self.sent += [source.nbytes for _, source in pairs]
        return super().offload(pairs)

    def fetch(self, pairs, *after):
        self.fetched += [source.flatten()[0].item() for _, source in pairs]
        return super().fetch(pairs, *after)


@pytest.fixture
def step():
    """What makes the visits of one step, with what they have in common."""
    streams, pool, known = Counted(), HostPool(pinned=False), StepStorages()

    def visit(most_bytes=float("inf")):
        return OffloadedStorages(streams, pool, frozenset(), known, most_bytes)

    visit.streams, visit.pool, visit.known = streams, pool, known
    return visit


def test_views_of_one_storage_are_sent_once_for_all_visits(step):
    tensor = torch.arange(SIZE).float()
    first, second = step(), step()
    packed = [first.pack(tensor), first.pack(tensor[3:]), second.pack(tensor.view(32, 32).t())]
    assert step.streams.sent == [tensor.nbytes]
    assert second.num_offered_bytes == tensor.nbytes
    first.release()
    # The other visit is still at work with it.
    assert packed[0].storage.on_device is not None
    second.release()
    assert packed[0].storage.on_device is None
    found = [first.unpack(packed[0]), first.unpack(packed[1]), second.unpack(packed[2])]
    assert step.streams.fetched == [0]
    assert torch.equal(found[0], tensor)
    assert torch.equal(found[1], tensor[3:])
    assert torch.equal(found[2], tensor.view(32, 32).t())


def test_what_has_left_takes_nothing_of_the_device_and_comes_back_last_first(step):
    visit = step()
    with MemoryTracker() as tracker:
        tensors = [torch.full((SIZE,), float(number)) for number in range(3)]
        packed = [visit.pack(tensor) for tensor in tensors]
        del tensors
        assert tracker.held_bytes == 3 * 4 * SIZE
        visit.release()
        assert tracker.held_bytes == 0
        visit.fetch()
    assert step.streams.fetched == [2, 1, 0]
    assert [visit.unpack(each)[-1].item() for each in packed] == [0, 1, 2]


def test_what_is_beyond_the_share_of_a_visit_stays(step):
    visit = step(most_bytes=2 * 4 * SIZE)
    tensors = [torch.full((SIZE,), float(number)) for number in range(3)]
    packed = [visit.pack(each) for tensor in tensors for each in (tensor, tensor[1:])]
    assert step.streams.sent == 2 * [4 * SIZE]
    assert packed[4] is tensors[2]
    # All of it is counted, each storage once: the next step shares that out.
    assert visit.num_offered_bytes == 3 * 4 * SIZE


def test_what_something_else_keeps_stays_where_it_is(step):
    visit, tensor = step(), torch.arange(SIZE).float()
    packed = visit.pack(tensor)
    step.known.keep(tensor[1:])
    visit.release()
    assert visit.unpack(packed).data_ptr() == tensor.data_ptr()
    tensor.add_(1)
    # As it stays, nothing has to come back as it was.
    assert visit.pack(tensor) is tensor
    assert step.streams.sent == [tensor.nbytes]
    assert not step.streams.fetched


def test_buffers_of_the_host_are_used_again(step):
    for _ in range(3):
        visit = step()
        packed = visit.pack(torch.ones(SIZE))
        assert visit.unpack(packed)[0] == 1
        del packed, visit
    assert step.pool.num_bytes == 4 * SIZE


def test_a_storage_of_bytes_that_make_no_whole_number_comes_back(step):
    raw = torch.arange(4 * SIZE + 2).to(torch.uint8)
    numbers = raw[: 4 * SIZE].view(torch.float32)
    visit = step()
    packed = visit.pack(numbers)
    visit.release()
    assert torch.equal(visit.unpack(packed).view(torch.uint8), raw[: 4 * SIZE])
