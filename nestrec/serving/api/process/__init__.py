"""A serving process: its sockets, signals, log and open files."""
