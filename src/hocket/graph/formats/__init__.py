"""Readers of graph files, one module per format; `hocket.graph.files` picks the right one."""
