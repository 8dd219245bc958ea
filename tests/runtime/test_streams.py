"""Streams of CUDA devices: what is dropped while it is being sent arrives whole."""

import pytest
import torch

from hocket.runtime.placed_step import Channel, new_stream

LONG = 200_000_000
"""Cycles of a kernel that keeps a stream busy."""


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [slice(None), slice(None, None, 2)], ids=["dense", "spaced"])
def test_a_tensor_that_is_dropped_before_it_has_left_arrives_whole(columns):
    src, dst = (new_stream(torch.device("cuda", 0)) for _ in range(2))
    channel = Channel(src, dst)
    src.make_current()
    for is_dry_run in (True, False):  # The first use of a kernel may wait for the whole device.
        value = torch.ones(512, 1024, device="cuda")
        part, produced, address = value[:, columns], src.event(), value.data_ptr()
        with torch.cuda.stream(channel._send):
            torch.cuda._sleep(1 if is_dry_run else LONG)
        arrival = channel.copy(part, lambda tensor: tensor.contiguous(), produced)
        del value, part
        others = [torch.zeros(512, 1024, device="cuda") for _ in range(4)]
        src.finish()
    assert address not in {other.data_ptr() for other in others}
    dst.wait(arrival.event)
    dst.finish()
    src.release_current()
    assert bool((arrival.data == 1).all())
