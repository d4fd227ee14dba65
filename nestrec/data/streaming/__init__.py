"""Event streams: sources, time windows, and ingestion into a dataset."""
