"""Oracles and the fault runner for tests; no other folder imports this one."""
