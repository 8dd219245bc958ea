"""Transports of messages: inside a process, or over ZeroMQ."""
