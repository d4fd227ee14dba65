"""The parts of a run, put together: data, task, tables, dense weights.

What happens when a window of a run has ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from nestrec.base.config_values import iso_moment
from nestrec.base.errors import UserError
from nestrec.checkpoint import LoadedCheckpoint, RankCheckpoint
from nestrec.checkpoint.table_checkpointer import TableCheckpointer
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import CARD_FILE
from nestrec.data.samples.split import Part
from nestrec.data.samples.time_windows import TimeWindow
from nestrec.data.synthetic.synthetic_logs import generate, preset
from nestrec.distributed import Topology
from nestrec.distributed.collectives import raise_together
from nestrec.distributed.context_ring import ContextRing
from nestrec.embedding import EmbeddingEngine
from nestrec.pipeline.dense.dense_optimizer import DenseOptimizer
from nestrec.tasks.task import Evaluation, Task, placed
from nestrec.tasks.task_registry import make_task
from nestrec.training.run_config import DataConfig, RunConfig
from nestrec.training.state import TrainState

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Session:
    """What training and evaluation share."""

    cfg: RunConfig
    topology: Topology
    dataset: Dataset
    task: Task
    engine: EmbeddingEngine
    dense: DenseOptimizer
    tables: TableCheckpointer
    ring: ContextRing
    """ranks that hold parts of the same samples; alone where each computes whole ones"""

    @staticmethod
    def open(cfg: RunConfig, topology: Topology, generation: int | None = None) -> "Session":
        """generation: of the dataset; none: the one in force."""
        dataset = open_data(cfg.data, topology, generation)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(cfg.training.seed)
            task = make_task(cfg.task, dataset, seed=cfg.training.seed, dtype=cfg.training.dtype, tables=cfg.tables)
        task.model.to(device=topology.device, dtype=getattr(torch, cfg.training.dtype))
        ring = ContextRing(topology)
        if ring.size > 1:
            task.take_context(ring)
        tables = placed(task, cfg.batch, topology, window_cache=cfg.pipeline.window_cache)
        engine = EmbeddingEngine(tables, topology, topology.device, cfg.replica_sync)
        return Session(
            cfg=cfg,
            topology=topology,
            dataset=dataset,
            task=task,
            engine=engine,
            tables=TableCheckpointer(engine),
            ring=ring,
            dense=DenseOptimizer(task.model, cfg.optimizer, topology, topology.device, engine.row_watch),
        )

    def evaluate(self, part: Part) -> Evaluation:
        """Measure on held-out data, with the weights that are for use: their running means where those are kept."""
        with self.dense.averaged():
            return self.task.evaluate(self.engine, part)

    def on(self, dataset: Dataset) -> "Session":
        """The same run on a later generation of its data: tables grow, weights are the very same. Collective."""
        cfg = self.cfg
        before = self.task
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(cfg.training.seed)
            task = make_task(cfg.task, dataset, seed=cfg.training.seed, dtype=cfg.training.dtype, tables=cfg.tables)
        share_parameters(task.model, before.model)
        if self.ring.size > 1:
            task.take_context(self.ring)
        task.settle(cfg.batch, self.topology, getattr(before, "variant", None))
        placements = {name: table.placement for name, table in self.engine.tables.items()}
        self.engine.grow([replace(table, placement=placements[table.name]) for table in task.tables])
        return replace(self, dataset=dataset, task=task)

    def content(self, state: TrainState, base: int | None = None, *, aside_bytes: int | None = None) -> RankCheckpoint:
        """Everything that a checkpoint holds; with `base` only the rows used after that step.

        aside_bytes: it is safe from later steps until it is closed, with so much memory for rows that change; none:
        it must be written before the next step.
        """
        owns_copy = self.topology.replica == 0
        tables = self.tables.rows(state.step, base, aside_bytes) if owns_copy else {}
        tables |= self.tables.read_ahead()
        removed = self.tables.removed(state.step, base) if owns_copy and base is not None else {}
        tensors = self.dense.tensors()
        if aside_bytes is not None:
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        return RankCheckpoint(
            tensors=tensors,
            state={"train": state.to_plain()},
            tables=tables,
            removed=removed,
            base=base,
            shard=(self.topology.shard, self.topology.num_shards),
            close=self.tables.thaw,
        )

    def restore(self, restored: LoadedCheckpoint) -> TrainState:
        """Take back what `content` gave, on any number of ranks."""
        self.tables.take(restored)
        return self.settle(restored)

    def settle(self, restored: LoadedCheckpoint) -> TrainState:
        """`restore` but for the rows of tables, which were taken before. Collective."""
        self.dense.load(restored.tensors)
        self.tables.settle()
        return TrainState.from_plain(restored.state["train"])


def share_parameters(model: nn.Module, source: nn.Module) -> None:
    """A model takes the parameters and buffers of another of the same kind: not copies, they are the same tensors."""
    theirs = dict(source.named_modules())
    for name, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            mine, others = getattr(module, kind), getattr(theirs[name], kind)
            assert list(mine) == list(others), name
            mine.update(others)


def open_data(cfg: DataConfig, topology: Topology, generation: int | None = None) -> Dataset:
    """The prepared dataset; a synthetic one is generated first where it is missing."""
    # Only the first rank looks and makes: others might look while it is being made, and would not wait for it.
    on_first(topology, lambda: _make_sure(cfg))
    return together(topology, lambda: Dataset.open(cfg.folder, generation=generation))


def on_first(topology: Topology, action: Callable[[], T]) -> T | None:
    """The result of `action` on the first rank, which alone runs it; its error is raised on all. Collective."""
    return together(topology, lambda: action() if topology.is_first else None)


def together(topology: Topology, action: Callable[[], T]) -> T:
    """The result of `action`; its error on one rank is raised on all."""
    try:
        result = action()
    except UserError as error:
        if topology.world > 1:
            raise_together(topology.control, error)
        raise
    raise_together(topology.control, None)
    return result


def _make_sure(cfg: DataConfig) -> None:
    """Raise, or generate, where there is no dataset."""
    if not cfg.folder:
        raise UserError(
            "no dataset is named", option="data.folder", value="", remedy=cfg.prepare or "name a prepared folder"
        )
    if Path(cfg.folder, CARD_FILE).exists():
        return
    if cfg.synthetic is None:
        remedy = f"make it first: {cfg.prepare}" if cfg.prepare else "make it with `nestrec prepare`"
        if not Path(cfg.folder).is_absolute():
            remedy += f", or go where {cfg.folder} is: it was looked for in {Path.cwd()}"
        raise UserError("there is no prepared dataset here", option="data.folder", value=cfg.folder, remedy=remedy)
    generate(preset(cfg.synthetic), Path(cfg.folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowEnd:
    """A window has been predicted and trained on, and the state after it is on the disk."""

    session: Session
    """data, tables and dense weights as they are now; nothing is in flight"""
    state: TrainState
    """`state.step` names the checkpoint"""
    number: int
    """of the window in this run, from 0"""
    from_ms: int
    """time of its first event"""
    to_ms: int
    """time of its last event"""
    num_events: int
    """of the window"""
    read_at_s: float | None = None
    """when its newest event was read from a stream, in seconds since 1970; none where there is no stream"""
    first_at_s: float | None = None
    """when its oldest event came to the source, likewise"""
    mean_at_s: float | None = None
    """the mean over its events"""
    closed_at_s: float | None = None
    """when it was closed"""
    is_restart: bool = False
    """the run was started again and stands at the end of this window: a kill may have come before the hooks were
    called, or after"""


def check_any_window(windows: Sequence[TimeWindow], start_ms: int, seen_by: Path | None) -> None:
    """Raise a UserError where no event to train on comes after the beginning.

    seen_by: the run whose newest event gave the beginning; one event of a wrong clock may be that.
    """
    if windows or not start_ms:
        return
    moment = iso_moment(start_ms)
    why = "" if seen_by is None else f", and {seen_by} has seen an event of just before then"
    raise UserError(
        f"no event to train on is from then or later{why}",
        option="windows.start",
        value=moment,
        remedy="append newer events (some of the last are held out, see task.split), or name the moment from which "
        "events are new: --windows.start",
    )


WindowHook = Callable[[WindowEnd], None]
"""Called on every rank, in the order of the collectives; what it does must be the same when it is done twice."""
