"""The front of one instance in processes of its own: they read requests and write answers, one process computes."""
