"""The walk of one training batch under `nested`: the files that it goes through, found by following its calls.

`python tests/multi/batch_walk.py` writes docs/architecture-walk.md.
"""

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nestrec
from nestrec.data.batch_loader import Batch, MicroBatch
from nestrec.data.batch_order import BatchPosition
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, TableConfig
from nestrec.ops.embedding.row_gather import gather_rows
from nestrec.pipeline import LearningRates, LookaheadIterator, PipelineCore, TrainingStep
from nestrec.pipeline.dense.dense_optimizer import DenseOptimizer, OptimizerConfig
from nestrec.pipeline.exchange_window import LossCompute

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture-walk.md"
PACKAGE = Path(nestrec.__file__).parent
TOOLS = ("base", "trace", "ops")
"""Folders whose files are used everywhere; they are not counted."""
SAMPLES, WATCHED = 8, 5
STAGES = {
    "train": "the trainer takes the next batch, plans the step and calls the schedule",
    "schedule": "the schedule submits the stages",
    "deduplicate": "load: tensors to the device, keys deduplicated (lane `transfer`)",
    "route": "keys to their owners (lane `communication`)",
    "arrange": "what crosses with each micro-batch (lane `transfer`)",
    "fetch": "rows from the store into a buffer (lane `lookup`)",
    "intersect": "rows that the batch before shares (lane `lookup`)",
    "copy": "shared rows, once the batch before has updated them (compute)",
    "vectors": "vectors to the ranks that asked, E (lane `communication`)",
    "compute": "forward and backward, F (compute)",
    "gradients": "gradients to the owners, G (lane `communication`)",
    "reduce": "dense gradients summed over ranks (lane `communication`)",
    "update": "rows updated (compute)",
    "apply": "dense weights updated (compute)",
    "write_back": "rows to the store (lane `lookup`)",
}
"""In the order in which one batch comes to them."""
ON_COMPUTE = {"copy_shared": "copy", "compute": "compute", "update_rows": "update", "apply_dense": "apply"}
"""Stages that run on the caller's thread, by the machine's method."""


@dataclass
class Walk:
    """Stages with the files that they enter, in order of first entry."""

    stages: dict[str, list[str]]
    num_calls: int
    """Calls from a file of one folder into one of another, of a batch that goes through every stage once."""

    @property
    def files(self) -> list[str]:
        """In order of first entry."""
        return list(dict.fromkeys(file for stage in STAGES for file in self.stages.get(stage, [])))

    @property
    def num_crossings(self) -> int:
        """Changes of folder from one file to the next."""
        return sum(a.split("/")[0] != b.split("/")[0] for a, b in pairwise(self.files))


class CallFollower:
    """A profile function that notes which files a stage enters."""

    def __init__(self) -> None:
        self.is_on = self.is_first = False
        self.stages: dict[str, dict[str, None]] = {}
        self._root = str(PACKAGE) + os.sep
        self._now = threading.local()
        self._runs: Counter[str] = Counter()
        self.num_calls = 0

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith(self._root):
            return
        file, name = file.removeprefix(self._root).replace(os.sep, "/"), frame.f_code.co_name
        stages, folders = (self._now.__dict__.setdefault(kind, []) for kind in ("stages", "folders"))
        begun = self._begun(file, name, frame)
        folder = file.split("/")[0]
        if event == "return":
            if begun is not None:
                stages.pop()
            if folder not in TOOLS and folders:
                folders.pop()
            return
        if begun is not None:
            stages.append((begun, self.is_on and self._runs[begun] == 0))
            self._runs[begun] += self.is_on
        if folder in TOOLS:
            return
        stage, is_counted = stages[-1] if stages else ("schedule", self.is_first)
        if self.is_on and stage in STAGES:
            self.stages.setdefault(stage, {})[file] = None
            self.num_calls += bool(is_counted and folders and folders[-1] != folder)
        folders.append(folder)

    def _begun(self, file: str, name: str, frame: Any) -> str | None:
        """The stage that this call is."""
        if file == "pipeline/lanes.py" and name == "_run_one":
            return str(frame.f_locals["entry"].label.name).rpartition(".")[2]
        return ON_COMPUTE.get(name) if file == "pipeline/stage_runner.py" else None


def walk(topology: Topology) -> Walk:
    """Of a batch of the trainer's: one table on the device, two micro-batches."""
    model = torch.nn.Linear(4, 1)

    def loss(micro_batch, rows, index):
        return model(gather_rows(rows["items"], index["items"])).square().sum()

    device = torch.device("cpu")
    dense = DenseOptimizer(model, OptimizerConfig(), topology, device)
    engine = EmbeddingEngine([TableConfig(name="items", num_rows=64, dim=4)], topology)
    core = PipelineCore.build(LossCompute(loss, device), engine, dense, "nested")
    follower = CallFollower()
    feed = LookaheadIterator(iter(list(_batches(topology.rank))))
    threading.setprofile(follower)  # the lanes' threads are started by the first steps
    sys.setprofile(follower)
    try:
        for number in range(1, WATCHED + 3):
            batch = next(feed)
            follower.is_first = number == WATCHED
            follower.is_on = number in (WATCHED, WATCHED + 1)  # what one step submits, the next may wait for
            core.schedule.advance(
                TrainingStep(number=number, batch=batch, rates=LearningRates(dense=0.01, tables=0.1)), feed
            )
        follower.is_on = False
        core.schedule.advance(
            TrainingStep(number=WATCHED + 3, batch=next(feed), rates=LearningRates(0.01, 0.1), is_fence=True), feed
        )
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    core.close()
    stages = {stage: list(files) for stage, files in follower.stages.items()}
    return Walk({"train": callers_of_the_schedule(), **stages}, follower.num_calls + 1)


def callers_of_the_schedule() -> list[str]:
    """Return the files of the training loop that call the schedule, found by their text: the walk calls it itself."""
    files = sorted((PACKAGE / "training").rglob("*.py"))
    return [file.relative_to(PACKAGE).as_posix() for file in files if ".schedule.advance(" in file.read_text()]


def _batches(rank: int) -> Iterator[Batch]:
    """All rows exist before the step that is watched, and consecutive batches share some."""
    for step in range(WATCHED + 7):
        keys = (np.arange(2 * SAMPLES).reshape(2, SAMPLES) + 8 * (step % 2) + 16 * rank) % 64
        parts = [MicroBatch(np.arange(SAMPLES), {"items": keys[i]}, {}, 1, SAMPLES) for i in range(2)]
        yield Batch(BatchPosition(0, step), 4.0 * SAMPLES, np.arange(4 * SAMPLES), tuple(parts))


NEW_LINE = "\n"
BEFORE_TRAINING = {
    "`nestrec prepare` reads a log": (
        "data/formats/log_format.py",
        "data/prepare/input_files.py",
        "data/prepare/raw_rows.py",
        "data/prepare/event_parser.py",
        "data/prepare/parse.py",
        "data/prepare/id_encoder.py",
        "data/prepare/spill_files.py",
        "data/prepare/prepare_sequences.py",
        "data/prepare/dataset_writer.py",
    ),
    "threads of the loader assemble micro-batches": (
        "data/batch_order.py",
        "data/batch_loader.py",
        "data/event_layers.py",
        "data/samples/retrieval_collator.py",
    ),
}
"""What happens before a batch is trained on. These lists are written by hand and not counted."""


def page(found: Walk) -> str:
    """Return the text of docs/architecture-walk.md."""
    lines = []
    seen = set()
    for stage, meaning in STAGES.items():
        new = [file for file in found.stages.get(stage, []) if file not in seen]
        seen |= set(new)
        again = len(found.stages.get(stage, [])) - len(new)
        names = ", ".join(f"`{file}`" for file in new) or "no new file"
        lines.append(f"1. {meaning}: {names}" + (f" (and {again} listed above)" if again else ""))
    before = [f"- {what}: {', '.join(f'`{file}`' for file in files)}" for what, files in BEFORE_TRAINING.items()]
    return f"""One training batch under `nested` goes through {len(found.files)} files of `nestrec`, in this order:

{NEW_LINE.join(lines)}

How the files are counted: a test follows the calls of one step in the steady state on two ranks, with one table on the
device. A file counts if one of its functions is entered. The folders `base`, `trace` and `ops` are used everywhere and
are not counted, and neither is what the trainer does after a step (`_count_step` and the methods that follow it in
`train_step`).

{found.num_calls} calls lead from a file of one folder into another folder, and in the order above the folder changes
{found.num_crossings} times. Fewer calls would hide something: each of the ten stages that touch rows or keys enters
`embedding` once, from the lane that the schedule chose for it, and each of the five exchanges enters `distributed`
once.

Where the batch comes from:

{NEW_LINE.join(before)}
"""


if __name__ == "__main__":
    from support.rank_pool import RankPool

    pool = RankPool(2)
    PAGE.write_text(page(pool.run(walk)[0]))
    pool.close()
