"""Is it worth following? Window by window of time: a model frozen after the first part, trained anew, and followed.

nestrec bench fresh --recipe kuairand_ranking --folder data/kuairand-pure --hours 24 --metric auc/click
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from nestrec_bench.bench import Bench, Row
from nestrec_bench.quality.fresh_comparison import FreshComparison, compared


def _measure(bench: FreshComparison) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="nestrec-fresh-") as scratch:
        yield from compared(bench, Path(scratch))


def _said(row: Row) -> str:
    if "window" not in row:
        ahead = f"{row['ahead']:+.4f} [{row['ahead_low']:+.4f}, {row['ahead_high']:+.4f}] of frozen"
        return f"{row['way']:>8}: {row['metric']} {row['value']:.4f}, {ahead}, {row['train_s']:.1f} s"
    where = f"{row['way']:>8}, window {row['window']} of {row['events']} events"
    return f"{where}: {row['metric']} {row['value']:.4f} [{row['low']:.4f}, {row['high']:.4f}], {row['train_s']:.1f} s"


BENCH = Bench(config=FreshComparison, measure=_measure, said=_said)
