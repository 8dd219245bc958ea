"""The GPUs of this machine as devices of a fleet, and the numbers by which jobs see their own.

A device's name ends in its nvidia-smi number, which a job gets in ``CUDA_VISIBLE_DEVICES``. So no
two devices may end in the same number, whatever their types are.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

from hocket.base.config import cuda_visible_devices
from hocket.base.errors import UsageError
from hocket.fleet.rounds.state import FleetDevice
from hocket.hardware.detect import find_gpus
from hocket.service.executors.cgroups import find_cgroups
from hocket.service.executors.executor import Assignment
from hocket.service.server_config import ServerConfig

_CUDA_TYPE = re.compile(
    r"(nvidia|cuda|gpu|tesla|geforce|[gr]tx|titan|quadro|g[bh]?\d|[abhklptv]\d)", re.IGNORECASE
)
_INDEX = re.compile(r"[0-9]+$")
_SERVER = "this-machine"
_GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl")


def found_devices() -> tuple[FleetDevice, ...]:
    """GPUs that nvidia-smi lists and this process may use; none if there is no nvidia-smi."""
    usable = _usable()
    return tuple(
        FleetDevice(name=f"{gpu.kind}-{index}", device_type=gpu.kind, server=_SERVER)
        for index, gpu in enumerate(find_gpus())
        if usable is None or index in usable
    )


def _usable() -> set[int] | None:
    """Numbers of the GPUs in ``CUDA_VISIBLE_DEVICES``; None for all."""
    visible = cuda_visible_devices()
    if visible is None:
        return None
    parts = [part.strip() for part in visible.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={visible!r} does not name GPUs by their numbers",
            hint="write numbers, such as 0,1, or unset it; --devices does not look at it",
        )
    return {int(part) for part in parts}


def with_cuda_indexes(devices: tuple[FleetDevice, ...]) -> tuple[FleetDevice, ...]:
    """Devices with the GPUs of several types numbered consecutively.

    The GPUs of ``v100:2,p100:2`` get the numbers 0 to 3 in that order. Other devices keep their
    names.
    """
    gpus = [device for device in devices if _CUDA_TYPE.match(device.device_type)]
    indexes = [match[0] for device in gpus if (match := _INDEX.search(device.name))]
    if len(set(indexes)) == len(gpus):
        return devices
    named = {device.name: f"{device.device_type}-{index}" for index, device in enumerate(gpus)}
    return tuple(replace(device, name=named.get(device.name, device.name)) for device in devices)


def limit_warnings(devices: tuple[FleetDevice, ...], config: ServerConfig) -> list[str]:
    """Describe what jobs could do to each other on this machine."""
    found = find_cgroups()
    has_gpus = any(_CUDA_TYPE.match(device.device_type) for device in devices)
    is_enforced = found is not None and found.version == 1 and "devices" in found.can
    warnings = []
    if found is None and (config.memory or config.cpus):
        warnings.append("no control group can be made: memory is watched, CPU time is not limited")
    if has_gpus and not is_enforced and any(map(os.path.exists, _GPU_FILES)):
        warnings.append("GPUs are hidden by CUDA_VISIBLE_DEVICES alone, which a job can unset")
    if os.geteuid() == 0 and any(not limits.unix_user for limits in config.users.values()):
        warnings.append("the service is root: jobs of users without unix_user run as root")
    if os.geteuid() != 0 and any(limits.unix_user for limits in config.users.values()):
        warnings.append("the service is not root: all jobs run as its own Unix user")
    return warnings


def with_cuda(assignment: Assignment) -> Assignment:
    """Set ``CUDA_VISIBLE_DEVICES`` to a job's devices, if their names end in GPU numbers."""
    indexes = [_INDEX.search(device) for device in assignment.devices]
    if not _CUDA_TYPE.match(assignment.device_type) or not all(indexes):
        return assignment
    visible = {
        "CUDA_VISIBLE_DEVICES": ",".join(match[0] for match in indexes if match),
        # By default CUDA numbers the fastest GPU first, but nvidia-smi numbers by PCI bus.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    return assignment._replace(
        environment={**visible, **assignment.environment},
        gpus=tuple(int(match[0]) for match in indexes if match),
    )
