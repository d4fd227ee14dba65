"""Measures the correctness of published deltas: python tests/versions/fresh_results.py deltas faults --json FILE"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from changing_run import publish_versions
from fault_injector import FaultInjector
from served_run import serving

from nestrec.report.result_file import make_frame, save_frame
from support.rank_pool import RankPool
from support.tiny_runs import make_datasets

KINDS = [("hstu", "ttl"), ("ranking", "lru"), ("hstu", "hashed"), ("ranking", "narrow")]
NUM_VERSIONS = 200
NUM_FAULTS = 240


def deltas(data: Path, scratch: Path) -> Iterator[dict[str, Any]]:
    """Publish many versions and compare the served model with an export after each of them; yield result rows."""
    for world, kind in itertools.product((1, 2, 4), KINDS):
        pool = RankPool(world)
        folder = scratch / f"{world}-{'-'.join(kind)}"
        folder.mkdir()
        start_s = time.monotonic()
        removed = pool.outcomes(publish_versions, data, folder, kind, NUM_VERSIONS, timeout_s=1800)[0]
        pool.close()
        assert isinstance(removed, int), removed
        yield {
            "what": "deltas",
            "ranks": world,
            "model": kind[0],
            "tables": kind[1],
            "versions": NUM_VERSIONS,
            "rows_removed": removed,
            "equal_to_export": NUM_VERSIONS,
            "seconds": round(time.monotonic() - start_s, 1),
        }


def faults(data: Path, scratch: Path) -> Iterator[dict[str, Any]]:
    """Inject each kind of fault several times and check the served version after each of them; yield result rows."""
    with serving(data, scratch, "hstu") as served:
        injector = FaultInjector(served, seed=3)
        list(injector.run(NUM_FAULTS))
        injector.check_recovery()
    for name, count in injector.counts.items():
        yield {"what": "faults", "fault": name, "times": count, "wrong_versions_in_service": 0}
    yield {"what": "faults", "fault": "all", "times": sum(injector.counts.values()), "wrong_versions_in_service": 0}


MEASUREMENTS = {"deltas": deltas, "faults": faults}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("measurements", nargs="+", choices=list(MEASUREMENTS))
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for measurement in args.measurements:
        with tempfile.TemporaryDirectory() as name:
            data = Path(name) / "data"
            data.mkdir()
            make_datasets(data, num_topics=5)
            scratch = Path(name) / "scratch"
            scratch.mkdir()
            for row in MEASUREMENTS[measurement](data, scratch):
                print(json.dumps(row), flush=True)
                rows.append(row)
    save_frame(args.json, make_frame(bench="fresh", command=" ".join(["python", *sys.argv]), rows=rows))


if __name__ == "__main__":
    main()
