"""All environment variables that configure hocket are read in this module only.

Variables that are only passed on to child processes are read where those processes are started.
"""

from __future__ import annotations

import os
from pathlib import Path

from hocket.base.errors import UsageError
from hocket.base.units import whole_number

_MAX_RANKS = 10**6


def debug() -> bool:
    """True if unexpected errors show their traceback (``HOCKET_DEBUG=1``)."""
    return os.environ.get("HOCKET_DEBUG", "") not in ("", "0")


def cuda_visible_devices() -> str | None:
    """GPUs visible to this process (``CUDA_VISIBLE_DEVICES``); None for all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def kernel_folder() -> Path | None:
    """Folder for compiled kernels (``NUMBA_CACHE_DIR``); None if unset."""
    text = os.environ.get("NUMBA_CACHE_DIR", "")
    return Path(text) if text else None


def cache_folder() -> Path | None:
    """Folder of the disk cache (below ``XDG_CACHE_HOME``); None without a home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):
        return Path(base) / "hocket"
    try:
        return Path.home() / ".cache/hocket"
    except RuntimeError:
        return None


def uses_disk_cache() -> bool:
    """True if results are cached on disk (``HOCKET_DISK_CACHE``, on unless it is 0)."""
    return os.environ.get("HOCKET_DISK_CACHE", "1") != "0"


def fleet_folder() -> Path:
    """Default folder of a fleet's state (below ``XDG_STATE_HOME``)."""
    base = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification says that relative paths must be ignored.
    if base.startswith("/"):
        return Path(base) / "hocket/fleet"
    try:
        return Path.home() / ".local/state/hocket/fleet"
    except RuntimeError:
        raise UsageError(
            "a fleet's state has no folder: this user has no home",
            hint="name one with --state, or set XDG_STATE_HOME",
        ) from None


def huggingface_folder() -> Path | None:
    """Cache folder of the Hugging Face hub, from its own variables; None without a home folder."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"])
    base = os.environ.get("HF_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache/huggingface") / "hub"
    except RuntimeError:
        return None


def fleet_token() -> str | None:
    """Token for a fleet service that is reached by URL (``HOCKET_FLEET_TOKEN``)."""
    return os.environ.get("HOCKET_FLEET_TOKEN", "").strip() or None


def fleet_fingerprint() -> str:
    """Certificate fingerprint of a fleet service reached by https (``HOCKET_FLEET_FINGERPRINT``).

    Empty if the certificate is publicly trusted.
    """
    return os.environ.get("HOCKET_FLEET_FINGERPRINT", "").strip()


def fleet_variables() -> dict[str, str]:
    """Settings that the fleet service passes to a job (``HOCKET_JOB``, …), and the job's rank."""
    return {
        name: text
        for name, text in os.environ.items()
        if name.startswith("HOCKET_") or name == "RANK"
    }


PLAN_VARIABLE = "HOCKET_PLAN"
"""Variable with the plan file that a launcher or a fleet chose for a script."""


def given_plan() -> str:
    """Plan file that a launcher or fleet chose for this process; raises `UsageError` if there is
    none.
    """
    if not os.environ.get(PLAN_VARIABLE):
        raise UsageError(
            f"{PLAN_VARIABLE} names no plan",
            hint="a fleet sets it for jobs that have plans; else name the plan's file",
        )
    return os.environ[PLAN_VARIABLE]


def rank_variables() -> dict[str, str]:
    """Settings that a launcher (hocket, torchrun, accelerate) passes to each rank."""
    numbers = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    given = {name: os.environ[name] for name in (*numbers, PLAN_VARIABLE) if name in os.environ}
    for name in numbers:
        if whole_number(given.get(name, "0"), _MAX_RANKS) is None:
            raise UsageError(
                f"{name}={given[name][:60]!r} is no number of a rank",
                hint=f"unset {name}, or start this with a launcher such as torchrun",
            )
    return given


def rank_profile() -> str:
    """File for the measured times of one step (``HOCKET_PROFILE``); empty if not requested."""
    return os.environ.get("HOCKET_PROFILE", "")


def environment_anywhere() -> dict[str, str]:
    """Environment for a child process with another working folder: import paths are made
    absolute."""
    paths = os.environ.get("PYTHONPATH", "")
    if not paths:
        return dict(os.environ)
    absolute = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))
    return {**os.environ, "PYTHONPATH": absolute}


def rank_network() -> tuple[str, str]:
    """Network interface of the ranks (``GLOO_SOCKET_IFNAME``), and their rendezvous address."""
    return os.environ.get("GLOO_SOCKET_IFNAME", ""), os.environ.get("MASTER_ADDR", "")


def rank_cluster() -> str:
    """Cluster of the ranks (``HOCKET_CLUSTER``: file or preset); empty if it must be detected."""
    return os.environ.get("HOCKET_CLUSTER", "")


def sums_are_wide() -> bool:
    """True if reduction trees add float32 values in float64 (``HOCKET_WIDE_SUMS=1``)."""
    return os.environ.get("HOCKET_WIDE_SUMS", "") not in ("", "0")
