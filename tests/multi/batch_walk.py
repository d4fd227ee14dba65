"""The path of one training batch under `nested`: the files that it goes through, found by tracing its calls.

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
SAMPLES, TRACED_STEP = 8, 5
STAGES = {
    "train": "the trainer takes the next batch, plans the step and calls the schedule",
    "schedule": "the schedule submits the stages",
    "deduplicate": "load: copy tensors to the device and deduplicate keys (lane `transfer`)",
    "exchange_keys": "send keys to their owners (lane `communication`)",
    "arrange": "determine the rows to send for each micro-batch (lane `transfer`)",
    "read_rows": "read rows from the store into a buffer (lane `lookup`)",
    "intersect": "find rows that the previous batch shares (lane `lookup`)",
    "copy": "copy shared rows after the previous batch has updated them (compute)",
    "exchange_vectors": "send vectors to the ranks that requested them, E (lane `communication`)",
    "compute": "forward and backward pass, F (compute)",
    "exchange_gradients": "send gradients to the owners, G (lane `communication`)",
    "all_reduce": "sum dense gradients over ranks (lane `communication`)",
    "update": "update rows (compute)",
    "apply": "update dense weights (compute)",
    "write_back": "write rows to the store (lane `lookup`)",
}
"""Stages and their descriptions, in the order in which a batch goes through them."""
STAGES_ON_CALLER = {"copy_shared": "copy", "compute": "compute", "update_rows": "update", "apply_dense": "apply"}
"""Methods of `StageRunner` whose stages run on the caller's thread, and the names of these stages."""


@dataclass
class Walk:
    """The stages of a batch with the files that they enter."""

    stages: dict[str, list[str]]
    """Files of each stage, in order of first entry."""
    num_calls: int
    """Number of calls between files of different folders, if every stage runs once."""

    @property
    def files(self) -> list[str]:
        """Files of all stages, in order of first entry."""
        return list(dict.fromkeys(file for stage in STAGES for file in self.stages.get(stage, [])))

    @property
    def num_folder_changes(self) -> int:
        """Number of changes of folder from one file to the next."""
        return sum(a.split("/")[0] != b.split("/")[0] for a, b in pairwise(self.files))


class CallTracer:
    """A profile function that records the files that each stage enters."""

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
        entered_stage = self._entered_stage(file, name, frame)
        folder = file.split("/")[0]
        if event == "return":
            if entered_stage is not None:
                stages.pop()
            if folder not in TOOLS and folders:
                folders.pop()
            return
        if entered_stage is not None:
            stages.append((entered_stage, self.is_on and self._runs[entered_stage] == 0))
            self._runs[entered_stage] += self.is_on
        if folder in TOOLS:
            return
        stage, is_counted = stages[-1] if stages else ("schedule", self.is_first)
        if self.is_on and stage in STAGES:
            self.stages.setdefault(stage, {})[file] = None
            self.num_calls += bool(is_counted and folders and folders[-1] != folder)
        folders.append(folder)

    def _entered_stage(self, file: str, name: str, frame: Any) -> str | None:
        """Return the stage that starts with this call, if any."""
        if file == "pipeline/lanes.py" and name == "_run_one":
            return str(frame.f_locals["entry"].label.name).rpartition(".")[2]
        return STAGES_ON_CALLER.get(name) if file == "pipeline/stage_runner.py" else None


def walk(topology: Topology) -> Walk:
    """Trace a batch of the trainer, with one table on the device and two micro-batches."""
    model = torch.nn.Linear(4, 1)

    def loss(micro_batch, rows, index):
        return model(gather_rows(rows["items"], index["items"])).square().sum()

    device = torch.device("cpu")
    dense = DenseOptimizer(model, OptimizerConfig(), topology, device)
    engine = EmbeddingEngine([TableConfig(name="items", num_rows=64, dim=4)], topology)
    core = PipelineCore.build(LossCompute(loss, device), engine, dense, "nested")
    tracer = CallTracer()
    feed = LookaheadIterator(iter(list(_batches(topology.rank))))
    threading.setprofile(tracer)  # the first steps start the threads of the lanes
    sys.setprofile(tracer)
    try:
        for number in range(1, TRACED_STEP + 3):
            batch = next(feed)
            tracer.is_first = number == TRACED_STEP
            tracer.is_on = number in (TRACED_STEP, TRACED_STEP + 1)  # the next step may wait for tasks of this one
            core.schedule.advance(
                TrainingStep(number=number, batch=batch, rates=LearningRates(dense=0.01, tables=0.1)), feed
            )
        tracer.is_on = False
        core.schedule.advance(
            TrainingStep(number=TRACED_STEP + 3, batch=next(feed), rates=LearningRates(0.01, 0.1), is_fence=True), feed
        )
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    core.close()
    stages = {stage: list(files) for stage, files in tracer.stages.items()}
    return Walk({"train": callers_of_schedule(), **stages}, tracer.num_calls + 1)


def callers_of_schedule() -> list[str]:
    """Return the files of the training loop that call the schedule.

    They are found by their text, because `walk` calls the schedule without a trainer.
    """
    files = sorted((PACKAGE / "training").rglob("*.py"))
    return [file.relative_to(PACKAGE).as_posix() for file in files if ".schedule.advance(" in file.read_text()]


def _batches(rank: int) -> Iterator[Batch]:
    """Yield batches whose rows all exist before the traced step; successive batches share some of them."""
    for step in range(TRACED_STEP + 7):
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
    "threads of the loader collate micro-batches": (
        "data/batch_order.py",
        "data/batch_loader.py",
        "data/event_layers.py",
        "data/samples/retrieval_collator.py",
    ),
}
"""Files that process a batch before training. These lists are written by hand and not counted."""


def page(path: Walk) -> str:
    """Return the text of docs/architecture-walk.md."""
    lines = []
    seen = set()
    for stage, meaning in STAGES.items():
        new = [file for file in path.stages.get(stage, []) if file not in seen]
        seen |= set(new)
        num_listed = len(path.stages.get(stage, [])) - len(new)
        names = ", ".join(f"`{file}`" for file in new) or "no new file"
        lines.append(f"1. {meaning}: {names}" + (f" (and {num_listed} listed above)" if num_listed else ""))
    before = [f"- {work}: {', '.join(f'`{file}`' for file in files)}" for work, files in BEFORE_TRAINING.items()]
    return f"""# The path of one training batch

This page lists the files of `nestrec` through which a training batch passes, for contributors who want to read the
code. [Pipelining](concepts/pipelining.md) explains the stages. One batch under `nested` passes through
{len(path.files)} files, in this order:

{NEW_LINE.join(lines)}

The files are counted as follows: a test traces the calls of one step in the steady state on two ranks, with one table
on the device. A file counts if one of its functions is entered. The folders `base`, `trace` and `ops` are used
everywhere and are not counted, and neither is the work of the trainer after a step (`_count_step` and the methods that
follow it in `train_step`).

{path.num_calls} calls lead from a file of one folder into another folder, and in the order above the folder changes
{path.num_folder_changes} times. Fewer calls are not possible without hiding a step: each of the ten stages that use
rows or keys calls `embedding` once, from the lane that the schedule chose for it, and each of the five exchanges calls
`distributed` once.

Before training, the batch passes through these files:

{NEW_LINE.join(before)}
"""


if __name__ == "__main__":
    from support.rank_pool import RankPool

    pool = RankPool(2)
    PAGE.write_text(page(pool.run(walk)[0]))
    pool.close()
