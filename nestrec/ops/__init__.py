"""One file a kernel: mathematics, reference, fast path."""
