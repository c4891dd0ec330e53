"""The running daemon: sockets, clock, log; one outside thing per file."""
