"""Schedules: one small file each, chosen by name. All of them arrange the same stages in time."""

from nestrec.pipeline.serial import Serial
from nestrec.pipeline.stages import Compute, Dense, Rates, Schedule, Totals

SCHEDULES = {"serial": Serial}

__all__ = ["SCHEDULES", "Compute", "Dense", "Rates", "Schedule", "Serial", "Totals"]
