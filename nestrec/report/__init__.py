"""Reports, charts, console tables and progress bars. TensorBoard and doctor are separate imports, as they are slow."""

from nestrec.report.console_tables import bench_table, evaluation_table, print_rows
from nestrec.report.live import LiveProgress
from nestrec.report.progress_bar import progress_for
from nestrec.report.run_page import write_report

__all__ = ["LiveProgress", "bench_table", "evaluation_table", "print_rows", "progress_for", "write_report"]
