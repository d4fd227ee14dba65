"""Item losses: full cross-entropy over the catalog, sampled softmax, grouped negatives.

All variants of a loss return the same values and differ in memory and time only.
"""
