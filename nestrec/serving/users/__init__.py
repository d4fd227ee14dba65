"""Users of datasets and of files, as a model reads them: what requests would tell of each, for very many at once."""
