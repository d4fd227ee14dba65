"""Load on a running server: open loop, so that stalls are not hidden."""
