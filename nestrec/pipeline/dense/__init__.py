"""The dense side of an update: the optimiser of the weights that every rank holds, and the sums over ranks."""
