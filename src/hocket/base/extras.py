"""Check that optional dependencies are installed, and name the missing extra in the error."""

from __future__ import annotations

from importlib.util import find_spec

from hocket.base.errors import MissingExtraError

_INSTALL = {
    "torch": "pip install 'hocket[torch]' (for a machine without GPU, install a CPU build of torch "
    "first)",
    "ray": "pip install 'hocket[ray]'",
    "fastapi": "pip install 'hocket[serve]'",
    "cryptography": "pip install 'hocket[serve]'",
    "prometheus_client": "pip install 'hocket[serve]'",
    "jinja2": "pip install 'hocket[serve]'",
    "zmq": "pip install 'hocket[tables]'",
    "uvicorn": "pip install 'hocket[serve]'",
    "onnxruntime": "pip install 'hocket[classes]'",
    "safetensors": "pip install 'hocket[classes]'",
    "torch_pruning": "pip install 'hocket[classes]'",
}


def require(package: str, purpose: str) -> None:
    """Raise `MissingExtraError` unless ``package`` can be imported."""
    try:
        missing = find_spec(package) is None
    except ValueError:  # sys.modules says None: blocked on purpose
        missing = True
    if missing:
        raise MissingExtraError(f"{purpose} needs {package}", hint=_INSTALL[package])
