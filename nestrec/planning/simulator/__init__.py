"""Schedules replayed over costs: programs are recorded once and replayed on any number of ranks."""
