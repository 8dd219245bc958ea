"""Planned collectives between processes: rank tables, sockets, link probes, a process group."""
