"""The protocol of tables, without sockets, threads or clocks on the wall: states and messages."""
