"""Write the artifacts that tests/unit/checkpoint/test_old_formats.py loads: small files of every stored format.

Run this by hand, with the source tree whose formats are to be kept loadable, from the root of the repository:

    PYTHONPATH=SOURCE_TREE python tests/formats/write_artifacts.py NAME

It writes tests/formats/artifacts/NAME/*.tar.xz and expected.json, which must not exist yet. NAME is the commit of the
source tree. The stored files are never written again: when a format changes, add a new folder next to the existing
ones, and all of them must load. Data, seeds and options are fixed, so two runs give the same tables, weights and
scores; only the dates and the random names of the runs differ.

Paths inside the artifacts are relative to the folder into which the archives are unpacked. The one exception is the
address of a stream, which is resolved before it is stored; the script therefore works in a folder with a fixed name.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stored_formats
from stored_formats import ARTIFACTS, EXPECTED_FILE, HISTORY_PARTS, HISTORY_USER, OBSERVERS

import nestrec

ROOT = Path("/tmp/nestrec-formats")
NUM_USERS = 24
NUM_ITEMS = 30
NUM_ROWS = 80
START_MS = 1_640_000_000_000
STEP_MS = 3_600_000
NUM_STEPS = 4
"""Training steps of each run; an epoch has 3, so the last checkpoint is incremental and in the middle of an epoch."""
BATCH_SAMPLES = 8
ON_TWO_RANKS = "ranking"
"""The run whose checkpoints consist of the files of two ranks."""

_COMMON: dict[str, Any] = {
    "training.device": "cpu",
    "training.seed": 7,
    "training.early_stopping_patience": None,
    "training.max_steps": NUM_STEPS,
    "training.checkpoint_every_steps": 1,
    "training.incremental_checkpoints": 3,
    "training.max_checkpoints": 1,
    "batch.batch_size": BATCH_SAMPLES,
    "batch.num_micro_batches": 2,
}
_ENCODER: dict[str, Any] = {"task.encoder.dim": 8, "task.encoder.head_dim": 4}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "retrieval": (
        "demo",
        {
            **_ENCODER,
            "data.folder": "data/sequences",
            "data.synthetic": None,
            "task.encoder.max_length": 12,
            "task.history.max_events": 12,
            "task.negatives.num_negatives": 4,
            "task.evaluation.ks": [5, 10],
            "training.checkpoint_mirror": "mirror",
            "publish.address": "published",
            "publish.every_steps": 1,
            "publish.full_every_versions": 3,
        },
    ),
    "followed": (
        "demo",
        {
            **_ENCODER,
            "data.folder": "data/stream",
            "data.synthetic": None,
            "task.encoder.num_layers": 1,
            "task.encoder.max_length": 12,
            "task.history.max_events": 12,
            "task.negatives.num_negatives": 4,
            "training.max_steps": 1,
            "training.eval_every_epochs": 0,
            "task.evaluation.baselines": [],
            "publish.address": "published_stream",
            "publish.every_steps": 1,
        },
    ),
    "ranking": (
        "ranking",
        {
            **_ENCODER,
            "data.folder": "data/sequences",
            "task.encoder.max_length": 32,
            "task.history.max_events": 16,
            "task.inputs.labels": ["click", "like"],
            "task.inputs.event_features": ["device", "price"],
            "task.inputs.user_features": ["country"],
            "task.inputs.item_features": ["topic"],
            "task.evaluation.baselines": ["logistic"],
            "task.evaluation.slices": [],
        },
    ),
    "rows": (
        "criteo_dlrm",
        {
            "data.folder": "data/rows",
            "batch.batch_size": 24,
            "task.encoder.dim": 4,
            "task.encoder.bottom_mlp": [8],
            "task.encoder.top_mlp": [8],
            "task.table_store.admission_threshold": 2,
            "task.table_store.eviction_policy": "lru",
            "task.table_store.max_rows": 120,
        },
    ),
}
EXPORTS: dict[str, tuple[str, dict[str, Any]]] = {
    "retrieval": ("retrieval", {}),
    "retrieval_int8": ("retrieval", {"table_dtype": "int8", "defaults.times": "now"}),
    "retrieval_faiss": ("retrieval", {"search.kind": "faiss_ivf", "search.ivf_nlist": 2, "search.ivf_nprobe": 2}),
    "ranking": ("ranking", {}),
    "ctr": ("rows", {}),
}
ARCHIVES = {
    "datasets": ["data", "logs"],
    "run_retrieval": ["runs/retrieval", "mirror", "published"],
    "run_followed": ["runs/followed", "published_stream"],
    "run_ranking": ["runs/ranking"],
    "run_rows": ["runs/rows"],
    "servables": ["models"],
    "others": ["own_model", "history.bin", "result.json", "jobs", "configs"],
}
"""Name of an archive to the folders and files inside it."""


def write_logs(folder: Path) -> None:
    """Writes a log with features of events, items and users, a later log with new ones, and rows like Criteo's."""
    (folder / "stream").mkdir(parents=True)
    draw = random.Random(1)
    first = _events(draw, range(NUM_USERS), NUM_ITEMS - 4, START_MS, num_events=10)
    later = _events(draw, range(NUM_USERS // 2, NUM_USERS + 2), NUM_ITEMS, START_MS + 40 * STEP_MS, num_events=3)
    last = _events(draw, range(10), NUM_ITEMS, START_MS + 80 * STEP_MS, num_events=2)
    header = "user,item,ts,clicked,liked,device,price"
    for name, events in (("events.csv", first), ("more.csv", later), ("last.csv", last)):
        (folder / name).write_text("\n".join([header, *events]) + "\n")
    topics = ["red", "green", "blue"]
    items = [f"i{item},{topics[item % 3]},Item number {item}" for item in range(NUM_ITEMS)]
    (folder / "items.csv").write_text("\n".join(["item,topic,title", *items]) + "\n")
    users = [f"u{user},{'at' if user % 2 else 'de'}" for user in range(NUM_USERS + 2)]
    (folder / "users.csv").write_text("\n".join(["user,country", *users]) + "\n")
    rows = []
    for _ in range(NUM_ROWS):
        numbers = [draw.choice(["", str(draw.randrange(100))]) for _ in range(13)]
        categories = [draw.choice(["", f"{draw.randrange(12):08x}"]) for _ in range(26)]
        rows.append("\t".join([str(draw.randrange(2)), *numbers, *categories]))
    (folder / "rows.txt").write_text("\n".join(rows) + "\n")


def _events(draw: random.Random, users: range, num_items: int, first_ms: int, *, num_events: int) -> list[str]:
    lines = []
    for user in users:
        for event in range(num_events):
            item = draw.randrange(num_items)
            time_ms = first_ms + event * STEP_MS + draw.randrange(STEP_MS)
            clicked = draw.randrange(2)
            liked = int(draw.random() < 0.3)
            device = draw.choice(["web", "app", "tv"])
            price = draw.randrange(1, 500) / 10
            lines.append(f"u{user},i{item},{time_ms},{clicked},{liked},{device},{price}")
    return lines


def write_datasets() -> None:
    """Prepares event sequences in two generations, a dataset that a stream is read into, and labeled rows."""
    times: dict[str, Any] = {"log.time": "ts", "log.time_unit": "ms"}
    features: dict[str, Any] = {
        "log.actions": "click=clicked,like=liked",
        "log.categories": "device",
        "log.numbers": "price",
        "log.num_buckets": 4,
        "items": "logs/items.csv",
        "item_columns.categories": "topic",
        "item_columns.display_columns": "title",
        "users": "logs/users.csv",
        "user_columns.categories": "country",
    }
    nestrec.prepare("log", "logs/events.csv", "data/sequences", **times, **features)
    overrides = {"items": "logs/items.csv", "users": "logs/users.csv"}
    nestrec.append("logs/more.csv", "data/sequences", overrides=overrides)
    nestrec.prepare("log", "logs/events.csv", "data/stream", **times)
    nestrec.prepare("criteo", "logs/rows.txt", "data/rows")


def write_runs() -> None:
    for task, (recipe, options) in RECIPES.items():
        typed = [f"--{name}={_typed(value)}" for name, value in {**_COMMON, **options}.items()]
        launch = ["launch", "-n", "2"] if task == ON_TWO_RANKS else []
        _nestrec(*launch, "train", recipe, "--output", f"runs/{task}", *typed)
    shutil.copy("logs/more.csv", "logs/stream/1.csv")
    stored_formats.follow("runs/followed")


def write_servables() -> None:
    for name, (task, options) in EXPORTS.items():
        nestrec.export(f"runs/{task}", f"models/{name}", options)


def write_own_model() -> None:
    """Writes the checkpoint of a training pipeline around a user's own module."""
    pipeline = stored_formats.own_pipeline()
    losses = stored_formats.train_own(pipeline, 2)
    nestrec.PipelineCheckpoints(pipeline, "own_model").save({"losses": losses})
    pipeline.close()


def write_history() -> None:
    """Writes the bytes under the key of one user in a shared history store: parts that were appended."""
    Path("history.bin").write_bytes(stored_formats.packed_history(HISTORY_USER, HISTORY_PARTS))


def write_result() -> None:
    """Writes a result file of a benchmark."""
    _nestrec("bench", "evaluations", "runs/retrieval", "--json", "result.json")


def write_job() -> None:
    """Writes a batch inference job that was killed after its first part, and the output of the whole job."""
    Path("jobs").mkdir()
    job = ["recommend", "models/retrieval", "--data", "data/sequences", "--device", "cpu", "--k", "5"]
    job += ["--part_users", "10", "--users", "all", "--output"]
    _nestrec(*job, "jobs/killed.parquet", fails=True, NESTREC_FAIL_POINTS="batch.part_written@1=kill")
    _nestrec(*job, "jobs/whole.parquet")


def write_configs() -> None:
    """Writes the resolved configuration of every recipe, as a run writes it."""
    from nestrec.base.config import dumps
    from nestrec.training.recipes import RECIPES as ALL

    Path("configs").mkdir()
    for name, make in ALL.items():
        Path(f"configs/{name}.json").write_text(dumps(make()))


def _typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _nestrec(*arguments: str, fails: bool = False, **environment: str) -> None:
    command = [sys.executable, "-m", "nestrec", *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, check=False)
    if bool(done.returncode) != fails:
        raise SystemExit(f"nestrec {' '.join(arguments)} ended with {done.returncode}")


def archive(file: Path, sources: list[str]) -> None:
    """Writes a .tar.xz without dates, owners and names of this machine. Hard links stay links."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = 0
        entry.gid = 0
        entry.uname = ""
        entry.gname = ""
        entry.mtime = 0
        return entry

    with tarfile.open(file, "w:xz", format=tarfile.PAX_FORMAT) as tar:
        for source in sources:
            tar.add(source, filter=plain)


def check_no_paths(folder: Path) -> None:
    """Rejects artifacts that contain the name of a folder, user or host of this machine."""
    names = {str(Path(nestrec.__file__).parents[1]), str(ARTIFACTS.parents[2]), os.uname().nodename, sys.prefix}
    names |= {str(Path.home()), "/home/", "/root/"}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            content = file.read_bytes()
            leaked = [name for name in names if len(name) > 3 and name.encode() in content]
            if leaked:
                raise SystemExit(f"{file.relative_to(folder)} contains {leaked}")


def main(name: str) -> None:
    target = ARTIFACTS / name
    target.mkdir(parents=True)
    sys.argv = ["nestrec"]  # the runs record the command line
    writers: list[Callable[[], None]] = [
        lambda: write_logs(Path("logs")),
        write_datasets,
        write_runs,
        write_servables,
        write_own_model,
        write_history,
        write_result,
        write_job,
        write_configs,
    ]
    ROOT.mkdir()
    try:
        os.chdir(ROOT)
        for write in writers:
            write()
        check_no_paths(ROOT)
        for archived, sources in ARCHIVES.items():
            archive(target / f"{archived}.tar.xz", sources)
    finally:
        os.chdir(target)
        shutil.rmtree(ROOT)
    expected = {}
    for kind, observe in OBSERVERS.items():
        with tempfile.TemporaryDirectory() as copy:  # its own copy, because an observer may continue what it loads
            stored_formats.unpack(target, Path(copy))
            os.chdir(copy)
            expected[kind] = observe()
            os.chdir(target)
    (target / EXPECTED_FILE).write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
