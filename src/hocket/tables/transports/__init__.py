"""How messages travel: inside a process, through shared memory, over ZeroMQ."""
