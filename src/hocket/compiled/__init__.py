"""Hot loops in compiled code: the decorators, the containers and the form of their tables.

Compiled functions allocate nothing: the caller makes every array, in numpy, and passes tuples of
them. The compiler itself (`hocket.compiled.jit`) is imported by the first kernel that runs, so that
commands which run none start at once.
"""
