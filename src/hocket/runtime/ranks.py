"""Rendezvous of ranks, pending sends, and errors that mean the loss of another rank.

Ranks rendezvous at a key-value store in the process that started them, on loopback by default.
`PendingSends` holds tensors until they are sent. `lost_another` recognizes errors of gloo and NCCL
that another rank has caused, so that the failed rank is reported and not this one.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import socket
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from hocket.base.errors import RunError, UsageError
from hocket.capture.fake import batch_tensors
from hocket.capture.recording import has_storage
from hocket.processes.root_cause import CONSEQUENCE

_PATIENCE = timedelta(days=1)
"""Timeout of collectives: in effect none, because the supervisor detects ranks that hang."""
LOOPBACK = "127.0.0.1"


class MeetingStore:
    """A key-value store that listens at an address; its port is free again when it is closed."""

    def __init__(self, host: str = LOOPBACK, port: int = 0) -> None:
        """Port 0 means any free port."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # A port of a run that has just ended is in TIME_WAIT for a while.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            listener.close()
            raise UsageError(
                f"cannot listen at {host}:{port}: {error.strerror}", hint="name a free port"
            ) from error
        listener.listen()
        self.port = int(listener.getsockname()[1])
        # The store owns and closes the descriptor from here on.
        self._store: Any = TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, timeout=_PATIENCE,
            master_listen_fd=listener.detach(),
        )  # fmt: skip

    def close(self) -> None:
        """Stop listening."""
        self._store = None


def own_device(header: dict[str, Any]) -> torch.device:
    """Select the device and the number of threads of this rank."""
    torch.set_num_threads(header["threads"])
    device = torch.device(header["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def join_group(header: dict[str, Any], device: torch.device) -> None:
    """Join the other ranks of a run."""
    if sys.platform == "linux":
        # All ranks of a run are on this machine.
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    store = TCPStore(LOOPBACK, header["port"], is_master=False, timeout=timedelta(minutes=5))
    dist.init_process_group(
        header["backend"],
        store=store,
        rank=header["rank"],
        world_size=header["num_ranks"],
        timeout=_PATIENCE,
        device_id=device if device.type == "cuda" else None,
    )


def join_ranks(environment: Mapping[str, str]) -> bool:
    """Join the ranks that ``hocket launch``, torchrun or ``accelerate launch`` has started.

    Return False if there is only this process.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    if int(environment.get("WORLD_SIZE", "1")) < 2 or "RANK" not in environment:
        return False
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    # Threads of process groups that outlive the interpreter crash the process.
    atexit.register(_leave_ranks)
    return True


def _leave_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_device(environment: Mapping[str, str]) -> torch.device:
    """Return the real device of this rank."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(environment.get("LOCAL_RANK", "0")))


_SIGNS = ("connection closed", "connection reset", "broken pipe", "remote process exited")
"""Parts of messages of gloo and NCCL after another rank has died."""


class CommunicationError(RunError):
    """Another rank has died, so this rank is not the root cause."""

    code = CONSEQUENCE


def lost_another(error: BaseException) -> bool:
    """True if an error, or its cause, comes from a connection that ended."""
    texts = [f"{type(found).__name__} {found}".lower() for found in _causes(error)]
    return any(sign in text for text in texts for sign in _SIGNS)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def require_same_batch(batch: Any) -> None:
    """Refuse batches that differ between ranks; all ranks call it together.

    Each rank trains on its part of one global batch. If every rank shuffled for itself, samples
    would be missed or repeated, and a pipeline would mix inputs and labels of different batches.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    digest = hashlib.blake2b()
    for name, tensor in batch_tensors(batch):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if has_storage(tensor) and not tensor.is_meta:
            flat = tensor.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().data)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, digest.hexdigest())
    if others := [rank for rank, other in enumerate(found) if other != found[0]]:
        raise UsageError(
            f"rank {others[0]} was given another batch than rank 0",
            hint="every rank takes the same global batch: seed a shuffling DataLoader alike on all "
            "ranks (generator=torch.Generator().manual_seed(0)) and use no DistributedSampler",
        )


def broadcast_text(text: str, owner: int, device: torch.device) -> str:
    """Broadcast the text of rank ``owner``. Collective: all ranks call it together."""
    sent = [text]
    dist.broadcast_object_list(sent, owner, device=device)
    return sent[0]


class PendingSends:
    """Sends in flight; tensors are held until they are sent."""

    def __init__(self) -> None:
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()

    def put(self, work: Any, data: torch.Tensor) -> None:
        """Hold ``data`` until its send ``work`` is complete."""
        # Gloo reports a send as complete only after `wait`, so its tensors are held until then.
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()
        self._sends.append((work, data))

    def wait(self) -> None:
        """Wait until all sends are complete."""
        while self._sends:
            self._sends.popleft()[0].wait()
