"""Pipeline schedules as data: known schedules by name (`make`), and torch's CSV files."""

from hocket.planners.parallel.schedules.make import make_schedule
from hocket.planners.parallel.schedules.torch_csv import to_torch_csv

__all__ = ["make_schedule", "to_torch_csv"]
