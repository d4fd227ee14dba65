"""Trainer, step, evaluation, state, recipes."""
