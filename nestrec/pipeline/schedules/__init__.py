"""Schedules: one small file each. All of them arrange the same stages in time."""
