"""Pages and tables of benchmarks."""
