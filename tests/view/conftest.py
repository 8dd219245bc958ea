import importlib.util
import sys

if importlib.util.find_spec("hocket.simulate.analysis") is None:
    sys.path.insert(0, "/tmp/viewdev")
    import stub  # noqa: F401
