"""Compiled code for hot loops: the decorator `kernel`, its disk cache, heaps, sets and tables.

A kernel is defined in the file of its algorithm and called like any function. Its dependencies are
found from its code (`dependencies`), and its compiled form is cached on disk (`numba_internals`).
The compiler is imported when Python first calls a kernel, so commands that call none start at once.
Kernels allocate nothing by default: the caller makes every array in numpy and passes named tuples
of arrays.
"""

from hocket.kernels.decorator import Kernel, is_compiled, kernel

__all__ = ["Kernel", "is_compiled", "kernel"]
