"""The sections of a run's page, each a function of the run's records that returns markup, or nothing to show."""

from nestrec.report.sections.balance import balance
from nestrec.report.sections.dataset import dataset
from nestrec.report.sections.details import configuration, events, versions
from nestrec.report.sections.model import model
from nestrec.report.sections.results import results
from nestrec.report.sections.speed import speed
from nestrec.report.sections.timeline import timeline
from nestrec.report.sections.training import training
from nestrec.report.sections.windows import windows

__all__ = [
    "balance",
    "configuration",
    "dataset",
    "events",
    "model",
    "results",
    "speed",
    "timeline",
    "training",
    "versions",
    "windows",
]
