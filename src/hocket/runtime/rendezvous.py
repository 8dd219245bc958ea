"""Rendezvous of ranks: a store, on loopback by default, held by the process that started them."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from hocket.base.errors import UsageError

_PATIENCE = timedelta(days=1)
"""The supervisor notices ranks that hang; an op may take as long as it takes."""
LOOPBACK = "127.0.0.1"


class MeetingStore:
    """A key-value store that listens at an address; its port is free again when it is closed."""

    def __init__(self, host: str = LOOPBACK, port: int = 0) -> None:
        """Port 0 is any that is free."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
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
        # The store owns the descriptor from here on.
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

    False where this process is alone.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    if int(environment.get("WORLD_SIZE", "1")) < 2 or "RANK" not in environment:
        return False
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    # Threads of groups that are still there when Python ends take the process down with them.
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
