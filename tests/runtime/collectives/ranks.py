"""What ranks do in the tests here; each tells the test what it is given to tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cli.terminal import exit_code

Tell = Callable[[Any], None]


def collectives(tell: Tell) -> str:
    import torch
    import torch.distributed as dist

    import hocket.torch_backend  # noqa: F401

    dist.init_process_group("hocket")
    rank, count = dist.get_rank(), dist.get_world_size()
    for size in (0, 1, 1000, 300_001):
        found = torch.arange(size, dtype=torch.float32) + rank
        dist.all_reduce(found)
        wanted = count * torch.arange(size, dtype=torch.float32) + count * (count - 1) / 2
        assert torch.equal(found, wanted)
    works = [dist.all_reduce(torch.full((9,), n), async_op=True) for n in range(20)]
    assert [int(w.get_future().wait()[0][0]) for w in works] == [n * count for n in range(20)]
    half = torch.full((5,), rank, dtype=torch.bfloat16)
    dist.broadcast(half, 1)
    assert bool((half == 1).all())
    parts = [torch.empty(3, dtype=torch.int16) for _ in range(count)]
    dist.all_gather(parts, torch.full((3,), rank, dtype=torch.int16))
    assert [int(part[0]) for part in parts] == list(range(count))
    whole = torch.empty(4 * count)
    dist.all_gather_into_tensor(whole, torch.full((4,), float(rank)))
    assert whole[::4].tolist() == list(range(count))
    mine = torch.empty(4)
    dist.reduce_scatter_tensor(mine, torch.arange(4.0 * count))
    assert torch.equal(mine, count * torch.arange(4.0 * count)[4 * rank : 4 * rank + 4])
    dist.reduce_scatter(mine, list(torch.ones(count, 4)))
    assert torch.equal(mine, torch.full((4,), float(count)))
    _odd_tensors(dist, torch)
    # What is not planned: other operations, point to point, barriers.
    most = torch.tensor([float(rank)])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert int(most) == count - 1
    dist.barrier()
    if rank < 2:
        dist.send(most, 1) if rank == 0 else dist.recv(most, 0)
    found = _trained(dist, torch)
    dist.destroy_process_group()
    return found


def _odd_tensors(dist: Any, torch: Any) -> None:
    """Tensors with gaps, of few bits, of two values, of two parts."""
    rank, count = dist.get_rank(), dist.get_world_size()
    turned = torch.arange(6.0).reshape(2, 3).t() + rank
    turned = turned if rank else turned.contiguous()
    dist.all_reduce(turned)
    assert torch.equal(turned, count * torch.arange(6.0).reshape(2, 3).t() + sum(range(count)))
    # Rounded once: of 256 + 1 + 1 nothing would be left in eight bits if it were added by turns.
    half = torch.full((5,), 1.0 if rank else 256.0, dtype=torch.bfloat16)
    dist.all_reduce(half)
    assert half.tolist() == [256.0 + count - 1] * 5
    flags = torch.tensor([rank == 1, rank == 0])
    dist.broadcast(flags, 1)
    assert flags.tolist() == [True, False]
    parts = [torch.empty((2, 0)), torch.empty((), dtype=torch.complex64)]
    for part in parts:
        every = [torch.empty_like(part) for _ in range(count)]
        dist.all_gather(every, torch.full_like(part, rank))
        assert all(torch.equal(each, torch.full_like(part, n)) for n, each in enumerate(every))
    one = torch.ones(2)
    try:
        dist.all_gather_into_tensor(torch.empty(count), one)
    except (RuntimeError, ValueError):
        one += 1
    assert one.tolist() == [2, 2]


def _trained(dist: Any, torch: Any) -> str:
    """Losses of a model under DistributedDataParallel, on the planned trees and on gloo."""
    found = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        model = torch.nn.parallel.DistributedDataParallel(net, process_group=group)
        draw = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(5):
            model.zero_grad()
            model(torch.randn(4, 8, generator=draw)).square().mean().backward()
            # As SGD does; importing torch.optim's compiler takes seconds.
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        found.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    return found[0].numpy().tobytes().hex()[:4000]


def endless(tell: Tell) -> None:
    import torch
    import torch.distributed as dist

    import hocket.torch_backend  # noqa: F401

    dist.init_process_group("hocket")
    for number in range(10**9):
        dist.all_reduce(torch.ones(50_000))
        if number == 3:
            tell("running")


def priority(tell: Tell) -> float:
    """The same training plain, with priorities and without crossing the end of a step."""
    import torch
    import torch.distributed as dist

    from hocket.priority import wrap

    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    for crosses in ("plain", True, False, None):
        torch.manual_seed(0)
        net = _Net(torch)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        wrapped = None
        if crosses != "plain":
            wrapped = wrap(net, optimizer, crosses=crosses, slice_bytes=1000)
        draw = torch.Generator().manual_seed(rank)
        for _ in range(7):
            optimizer.zero_grad()
            net(torch.randint(0, 50, (8,), generator=draw)).square().mean().backward()
            if wrapped is None:
                for parameter in net.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
            optimizer.step()
            schedule.step()
        state = net.state_dict()
        found.append(torch.cat([state[name].reshape(-1) for name in sorted(state)]))
        if wrapped is not None:
            wrapped.close()
    assert all(torch.equal(each, found[0]) for each in found)
    dist.destroy_process_group()
    return float(found[0].double().sum())


def _Net(torch: Any) -> Any:  # noqa: N802
    """Tied weights, attention that uses its part's weight itself, layers in another order."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(32, 50, bias=False)
            self.table = torch.nn.Embedding(50, 32)
            self.last.weight = self.table.weight
            self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)
            self.hidden = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))

        def forward(self, given: Any) -> Any:
            x = self.table(given)[None]
            return self.last(self.hidden(self.attention(x, x, x)[0]))

    return Net()


def probed(tell: Tell, file: str) -> int:
    """How ``hocket probe`` ends."""
    return exit_code(["probe", "-o", file])
