"""Pipeline schedules, one file each. All of them run the same stages, in a different order or overlapped."""
