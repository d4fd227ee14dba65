"""Operators: each module has the formulas, the reference implementation and the fast path (kernel) of one topic."""
