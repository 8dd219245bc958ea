"""Hot loops in compiled code: the decorator `kernel`, the cache, containers, the form of tables.

A kernel lives in the file of its algorithm and is called like any function. What it depends on is
found from its code (`dependencies`) and its compiled form is cached on disk (`numba_internals`).
The compiler is imported when Python first calls a kernel, so commands without one start at once.
Kernels allocate nothing: the caller makes every array, in numpy, and passes tuples of them.
"""

from hocket.kernels.decorator import Kernel, is_compiled, kernel

__all__ = ["Kernel", "is_compiled", "kernel"]
