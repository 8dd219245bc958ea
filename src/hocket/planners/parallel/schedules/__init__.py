"""Pipeline schedules: the known ones as data, one made for given stage times, and their checks."""

from hocket.planners.parallel.schedules.make import known_schedules, make_schedule
from hocket.planners.parallel.schedules.synthesis import synthesise
from hocket.planners.parallel.schedules.torch_csv import from_torch_csv, to_torch_csv
from hocket.planners.parallel.schedules.verify import verify_schedule

__all__ = [
    "from_torch_csv",
    "known_schedules",
    "make_schedule",
    "synthesise",
    "to_torch_csv",
    "verify_schedule",
]
