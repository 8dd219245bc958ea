"""``python -m hocket.cost.at_work``: multiplies matrices and copies memory until its input ends.

An empty line on standard output says that it has begun.
"""

from __future__ import annotations

import os
import sys
import threading

import numpy as np


def main() -> None:
    """Work; never returns."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    left = np.ones((512, 512), np.float32)
    product = np.empty_like(left)
    source = np.ones(2**22, np.float32)
    target = np.empty_like(source)
    sys.stdout.write("\n")
    sys.stdout.flush()
    while True:
        np.matmul(left, left, out=product)
        np.copyto(target, source)


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
