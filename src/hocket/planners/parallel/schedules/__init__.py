"""Pipeline schedules as data: known schedules, torch's CSV files, and checks."""

from hocket.planners.parallel.schedules.make import make_schedule
from hocket.planners.parallel.schedules.torch_csv import to_torch_csv
from hocket.planners.parallel.schedules.verify import verify_schedule

__all__ = ["make_schedule", "to_torch_csv", "verify_schedule"]
