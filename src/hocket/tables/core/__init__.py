"""The protocol of tables as functions on states and messages, without sockets or threads."""
