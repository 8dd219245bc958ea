"""Read arrays by name from an .npz file, without running any code in it."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from hocket.base.errors import InputFileError
from hocket.base.regular import open_regular


def read_npz(path: Path, *, what: str = "is no .npz file of arrays", hint: str) -> dict[str, Any]:
    """All arrays of a file by name; other files raise `InputFileError` with the text ``what``."""
    import numpy as np

    try:
        with open_regular(path) as file:
            stored: Any = np.load(file, allow_pickle=False)
            # numpy.save writes a single array without a name; such a file has no attribute `files`.
            return {name: stored[name] for name in stored.files}
    except OSError as error:
        raise InputFileError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except (ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise InputFileError(what, hint=hint, where=str(path)) from error
