"""Writes what deltas hold to: python tests/versions/fresh_results.py deltas faults bytes --json FILE"""

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

import nestrec
from nestrec.bench.harness.frame import make_frame, save_frame
from nestrec.data.synthetic.logs import generate, preset
from nestrec.serving.model.export import export_run
from nestrec.serving.versions.places import place_of
from nestrec.serving.versions.reader import Versions
from nestrec.testing.ranks import RankPool
from nestrec.testing.tiny_runs import make_datasets

KINDS = [("hstu", "ttl"), ("ranking", "lru"), ("hstu", "hashed"), ("ranking", "narrow")]
VERSIONS, FAULTS = 200, 240


def deltas(data: Path, scratch: Path) -> Iterator[dict[str, Any]]:
    """A follower against an export, after each of many versions."""
    for world, kind in itertools.product((1, 2, 4), KINDS):
        pool, folder = RankPool(world), scratch / f"{world}-{'-'.join(kind)}"
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


def bytes_of_deltas(_: Path, scratch: Path) -> Iterator[dict[str, Any]]:
    """The demo with a version after every ten steps."""
    address = str(scratch / "published")
    generate(preset("interests"), scratch / "data")
    options = {"publish.address": address, "publish.every_steps": 10, "training.max_steps": 60}
    run = nestrec.train("demo", {**options, "data.folder": str(scratch / "data")}, output=scratch / "run")
    export = export_run(run.folder, scratch / "export", best=False)
    versions = Versions(place_of(address))
    told = [versions.told(*at) for at in versions.history()]
    sizes = [manifest.num_bytes for manifest in told if manifest is not None and manifest.kind == "delta"]
    rows = [_rows_of(manifest) for manifest in told if manifest is not None and manifest.kind == "delta"]
    yield {
        "what": "bytes",
        "recipe": "demo",
        "steps_a_version": 10,
        "export_bytes": sum(file.bytes for file in export.files),
        "delta_bytes": sizes[len(sizes) // 2],
        "delta_bytes_of_rows": rows[len(rows) // 2],
        "share": round(sizes[len(sizes) // 2] / sum(file.bytes for file in export.files), 3),
    }


def _rows_of(manifest: Any) -> int:
    return sum(file.bytes for file in manifest.files if file.kind in ("rows", "index", "removed"))


PARTS = {"deltas": deltas, "faults": faults, "bytes": bytes_of_deltas}


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
