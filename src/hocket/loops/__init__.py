"""Serial loops run in parallel if dependence analysis proves that this is safe.

The steps are: source -> nest (dependence vectors) -> verdict (legal schedules) -> choice (tiles for
the data) -> job -> back end. `parallel_for` is the public interface.
"""
