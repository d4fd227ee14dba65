"""Comparison with other systems that train the same job."""
