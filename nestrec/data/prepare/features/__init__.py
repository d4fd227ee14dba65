"""Values of features while a dataset is prepared: lists in cells, vectors, and what is learnt of numbers."""
