"""Transports of messages: inside a process, through shared memory, over ZeroMQ."""
