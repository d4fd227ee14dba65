"""From the files of a source to a dataset on disk."""
