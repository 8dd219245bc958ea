"""Names for the array types that run through hocket."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
ByteArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
