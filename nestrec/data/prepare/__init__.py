"""Dataset preparation: reads the files of an event log and writes a dataset to disk."""
