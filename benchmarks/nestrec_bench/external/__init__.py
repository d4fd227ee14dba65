"""The same job through other systems."""
