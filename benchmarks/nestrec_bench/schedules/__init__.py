"""Schedules over limited links or an emulated fabric."""
