"""Planned collectives between processes: tables, sockets, probes, a process group."""
