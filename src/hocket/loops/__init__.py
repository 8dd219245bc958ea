"""Serial loops made parallel with a guarantee: dependence analysis, schedules, back ends.

source -> nest (dependence vectors) -> verdict (legal shapes) -> choice (tiles of the data) -> job
-> back end. `parallel_for` is the public face.
"""
