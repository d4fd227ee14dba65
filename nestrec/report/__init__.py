"""Pages, plots, tables and progress for people; tensorboard, quality and doctor are heavier and imported by name."""

from nestrec.report.html import write_report
from nestrec.report.live import LiveProgress
from nestrec.report.stages import progress_for
from nestrec.report.tables import bench_table, evaluation_table, print_rows

__all__ = ["LiveProgress", "bench_table", "evaluation_table", "print_rows", "progress_for", "write_report"]
