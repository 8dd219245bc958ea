"""What benchmarks share of Gavel's evaluation: its device types, batches, table and fleet."""

from __future__ import annotations

from pathlib import Path

from hocket.fleet.rounds import FleetDevice
from hocket.fleet.throughputs import Throughputs, read_throughputs

DATA = Path(__file__).parents[3] / "shared" / "data" / "cluster"
"""Where the public tables are unless a benchmark is told otherwise."""
TABLE = "gavel/simulation_throughputs.json"
DEVICE_TYPES = ("v100", "p100", "k80")
BATCHES = {
    "ResNet-18": (16, 32, 64, 128, 256),
    "ResNet-50": (16, 32, 64, 128),
    "Transformer": (16, 32, 64, 128, 256),
    "LM": (5, 10, 20, 40, 80),
}
"""Of the models that train in gangs."""


def gavel_table(folder: Path) -> Throughputs:
    """Gavel's table of simulated throughputs, of gangs on one server only."""
    return read_throughputs(folder / TABLE).on(DEVICE_TYPES)


def model_of(job_type: str) -> str:
    """The model of a job, without its batch."""
    return job_type.split(" (")[0]


def devices_of_each_type(num: int) -> tuple[FleetDevice, ...]:
    """So many devices of each device type, each a server of its own."""
    return tuple(
        FleetDevice(name=f"{device_type}-{at}", device_type=device_type)
        for device_type in DEVICE_TYPES
        for at in range(num)
    )
