"""Planned collectives carried out between processes: tables, sockets, probes, a process group."""
