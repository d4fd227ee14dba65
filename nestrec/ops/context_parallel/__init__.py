"""Context parallelism (ring attention): attention over sequences whose tokens are sharded over the ranks of a group."""
