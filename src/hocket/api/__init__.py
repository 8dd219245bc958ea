"""Functions of the public Python API and of commands that need several packages."""
