"""Frontend workers: separate processes that parse HTTP requests and write responses for one engine process."""
