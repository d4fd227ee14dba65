"""Pages and tables of benches."""
