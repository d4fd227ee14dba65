"""Writes what deltas hold to: python tests/versions/fresh_results.py deltas faults --json FILE"""

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
from faulty_run import FaultyRun
from served_run import serving

from nestrec.report.result_file import make_frame, save_frame
from support.rank_pool import RankPool
from support.tiny_runs import make_datasets

KINDS = [("hstu", "ttl"), ("ranking", "lru"), ("hstu", "hashed"), ("ranking", "narrow")]
VERSIONS, FAULTS = 200, 240


def deltas(data: Path, scratch: Path) -> Iterator[dict[str, Any]]:
    """A follower against an export, after each of many versions."""
    for world, kind in itertools.product((1, 2, 4), KINDS):
        pool = RankPool(world)
        folder = scratch / f"{world}-{'-'.join(kind)}"
        folder.mkdir()
        start_s = time.monotonic()
        removed = pool.outcomes(publish_versions, data, folder, kind, VERSIONS, timeout_s=1800)[0]
        pool.close()
        assert isinstance(removed, int), removed
        yield {
            "what": "deltas",
            "ranks": world,
            "model": kind[0],
            "tables": kind[1],
            "versions": VERSIONS,
            "rows_removed": removed,
            "equal_to_export": VERSIONS,
            "seconds": round(time.monotonic() - start_s, 1),
        }


def faults(data: Path, scratch: Path) -> Iterator[dict[str, Any]]:
    """Each kind of fault many times; after each, what is in service is looked through."""
    with serving(data, scratch, "hstu") as served:
        faulty = FaultyRun(served, seed=3)
        list(faulty.run(FAULTS))
        faulty.heal()
    for name, count in faulty.done.items():
        yield {"what": "faults", "fault": name, "times": count, "wrong_versions_in_service": 0}
    yield {"what": "faults", "fault": "all", "times": sum(faulty.done.values()), "wrong_versions_in_service": 0}


PARTS = {"deltas": deltas, "faults": faults}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--json", type=Path, required=True)
    chosen = parser.parse_args()
    rows = []
    for part in chosen.parts:
        with tempfile.TemporaryDirectory() as name:
            data = Path(name) / "data"
            data.mkdir()
            make_datasets(data, num_topics=5)
            scratch = Path(name) / "scratch"
            scratch.mkdir()
            for row in PARTS[part](data, scratch):
                print(json.dumps(row), flush=True)
                rows.append(row)
    save_frame(chosen.json, make_frame(bench="fresh", command=" ".join(["python", *sys.argv]), rows=rows))


if __name__ == "__main__":
    main()
