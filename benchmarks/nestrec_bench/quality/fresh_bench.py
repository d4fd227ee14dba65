"""Compare ways to keep a model fresh, by time window: frozen after the first part, retrained, or trained continuously.

nestrec bench fresh --recipe kuairand_ranking --folder data/kuairand-pure --hours 24 --metric auc/click
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from nestrec_bench.bench import Bench, Row
from nestrec_bench.quality.fresh_comparison import FreshComparison, compare


def _measure(bench: FreshComparison) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="nestrec-fresh-") as scratch:
        yield from compare(bench, Path(scratch))


def _progress_line(row: Row) -> str:
    if "window" not in row:
        ahead = f"{row['ahead']:+.4f} [{row['ahead_low']:+.4f}, {row['ahead_high']:+.4f}] against frozen"
        return f"{row['way']:>8}: {row['metric']} {row['value']:.4f}, {ahead}, {row['train_s']:.1f} s"
    window = f"{row['way']:>8}, window {row['window']} of {row['events']} events"
    return f"{window}: {row['metric']} {row['value']:.4f} [{row['low']:.4f}, {row['high']:.4f}], {row['train_s']:.1f} s"


BENCH = Bench(config=FreshComparison, measure=_measure, progress_line=_progress_line)
