"""``python -m hocket.cost.at_work``: keep CPU cores busy while another process measures.

It multiplies matrices, or copies memory after a line ``stream`` on standard input, until a line
``compute`` or the end of input. It prints an empty line once it has started.
"""

from __future__ import annotations

import os
import sys
import threading

import numpy as np

COMPUTE, STREAM = b"compute\n", b"stream\n"


def main() -> None:
    """Run the load; never returns."""
    latest = [COMPUTE]
    threading.Thread(target=_listen, args=(latest,), daemon=True).start()
    left = np.ones((512, 512), np.float32)
    product = np.empty_like(left)
    # Larger than caches: what streams in training is.
    source = np.ones(2**24, np.float32)
    target = np.empty_like(source)
    sys.stdout.write("\n")
    sys.stdout.flush()
    while True:
        if latest[0] == STREAM:
            np.copyto(target, source)
        else:
            np.matmul(left, left, out=product)


def _listen(latest: list[bytes]) -> None:
    for line in sys.stdin.buffer:
        latest[0] = line
    os._exit(0)


if __name__ == "__main__":
    main()
