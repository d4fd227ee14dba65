"""Builds the data, task, embedding tables and dense weights of a run, and defines the hooks of time windows.

Also provides `run_on_first_rank` and `run_on_all_ranks`, which raise the error of one rank on all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from nestrec.base.config_values import format_iso_time
from nestrec.base.errors import UserError
from nestrec.checkpoint import LoadedCheckpoint, RankCheckpoint
from nestrec.checkpoint.table_checkpointer import TableCheckpointer
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import CARD_FILE
from nestrec.data.samples.split import Part
from nestrec.data.samples.time_windows import TimeWindow
from nestrec.data.synthetic.synthetic_logs import generate, preset
from nestrec.distributed import Topology
from nestrec.distributed.collectives import raise_on_all_ranks
from nestrec.distributed.context_ring import ContextRing
from nestrec.embedding import EmbeddingEngine
from nestrec.pipeline.dense.dense_optimizer import DenseOptimizer
from nestrec.tasks.task import Evaluation, Task, resolve_placements
from nestrec.tasks.task_registry import make_task
from nestrec.training.run_config import DataConfig, RunConfig
from nestrec.training.state import TrainState

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Session:
    """Components of a run that training and evaluation share."""

    cfg: RunConfig
    topology: Topology
    dataset: Dataset
    task: Task
    engine: EmbeddingEngine
    dense: DenseOptimizer
    tables: TableCheckpointer
    ring: ContextRing
    """Context-parallel group of this rank; of size 1 without context parallelism."""

    @staticmethod
    def open(cfg: RunConfig, topology: Topology, generation: int | None = None) -> "Session":
        """Build the session of a run. Collective.

        Args:
            cfg: Config of the run.
            topology: Ranks of the run.
            generation: Dataset generation; None for the current one.
        """
        dataset = open_dataset(cfg.data, topology, generation)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(cfg.training.seed)
            task = make_task(
                cfg.task, dataset, seed=cfg.training.seed, dtype=cfg.training.weight_dtype, tables=cfg.tables
            )
        task.model.to(device=topology.device, dtype=getattr(torch, cfg.training.weight_dtype))
        ring = ContextRing(topology)
        if ring.size > 1:
            task.set_context_ring(ring)
        tables = resolve_placements(task, cfg.batch, topology, window_cache=cfg.pipeline.window_cache)
        engine = EmbeddingEngine(tables, topology, topology.device, cfg.replica_sync)
        return Session(
            cfg=cfg,
            topology=topology,
            dataset=dataset,
            task=task,
            engine=engine,
            tables=TableCheckpointer(engine),
            ring=ring,
            dense=DenseOptimizer(task.model, cfg.optimizer, topology, topology.device, engine.finite_row_check),
        )

    def evaluate(self, part: Part) -> Evaluation:
        """Evaluate on held-out data; uses the exponential moving average of the weights if it is enabled."""
        with self.dense.averaged():
            return self.task.evaluate(self.engine, part)

    def with_dataset(self, dataset: Dataset) -> "Session":
        """Return the session on a later dataset generation: tables grow, dense weights are shared. Collective."""
        cfg = self.cfg
        before = self.task
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(cfg.training.seed)
            task = make_task(
                cfg.task, dataset, seed=cfg.training.seed, dtype=cfg.training.weight_dtype, tables=cfg.tables
            )
        tie_parameters(task.model, before.model)
        if self.ring.size > 1:
            task.set_context_ring(self.ring)
        task.choose_loss_variant(cfg.batch, self.topology, getattr(before, "variant", None))
        placements = {name: table.placement for name, table in self.engine.tables.items()}
        self.engine.grow([replace(table, placement=placements[table.name]) for table in task.tables])
        return replace(self, dataset=dataset, task=task)

    def checkpoint_content(
        self, state: TrainState, base: int | None = None, *, buffer_bytes: int | None = None
    ) -> RankCheckpoint:
        """Return the content of a checkpoint.

        Args:
            state: Training progress.
            base: Step of the base checkpoint of an incremental checkpoint, which contains only rows used since then;
                None for a full checkpoint.
            buffer_bytes: Size of the copy-on-write buffer, which allows training to continue until the content is
                closed; None if the content is written before the next step.
        """
        owns_copy = self.topology.replica == 0
        tables = self.tables.rows(state.step, base, buffer_bytes) if owns_copy else {}
        tables |= self.tables.prefetched_rows()
        removed = self.tables.removed(state.step, base) if owns_copy and base is not None else {}
        tensors = self.dense.tensors()
        if buffer_bytes is not None:
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        return RankCheckpoint(
            tensors=tensors,
            state={"train": state.to_plain()},
            tables=tables,
            removed=removed,
            base=base,
            shard=(self.topology.shard, self.topology.num_shards),
            close=self.tables.release_snapshots,
        )

    def restore(self, restored: LoadedCheckpoint) -> TrainState:
        """Restore a checkpoint, on any number of ranks. Collective."""
        self.tables.load_rows(restored)
        return self.restore_dense(restored)

    def restore_dense(self, restored: LoadedCheckpoint) -> TrainState:
        """Restore everything except table rows, which were loaded before. Collective."""
        self.dense.load(restored.tensors)
        self.tables.rebalance_capacity()
        return TrainState.from_plain(restored.state["train"])


def tie_parameters(model: nn.Module, source: nn.Module) -> None:
    """Let a model share the parameters and buffers of another model of the same structure (no copies)."""
    source_modules = dict(source.named_modules())
    for name, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            target, shared = getattr(module, kind), getattr(source_modules[name], kind)
            assert list(target) == list(shared), name
            target.update(shared)


def open_dataset(cfg: DataConfig, topology: Topology, generation: int | None = None) -> Dataset:
    """Open the prepared dataset; a missing synthetic dataset is generated first. Collective."""
    # Only rank 0 checks and generates: other ranks could see a partial folder and would not wait.
    run_on_first_rank(topology, lambda: _ensure_dataset(cfg))
    return run_on_all_ranks(topology, lambda: Dataset.open(cfg.folder, generation=generation))


def run_on_first_rank(topology: Topology, action: Callable[[], T]) -> T | None:
    """Run an action on rank 0 only and raise its error on all ranks. Collective.

    Returns:
        The result on rank 0; None on the other ranks.
    """
    return run_on_all_ranks(topology, lambda: action() if topology.is_first else None)


def run_on_all_ranks(topology: Topology, action: Callable[[], T]) -> T:
    """Run an action on all ranks and raise the error of any rank on all ranks. Collective."""
    try:
        result = action()
    except UserError as error:
        if topology.world > 1:
            raise_on_all_ranks(topology.control, error)
        raise
    raise_on_all_ranks(topology.control, None)
    return result


def _ensure_dataset(cfg: DataConfig) -> None:
    """Generate a missing synthetic dataset, or raise a UserError if there is no dataset."""
    if not cfg.folder:
        raise UserError(
            "a dataset is required",
            option="data.folder",
            value="",
            remedy=cfg.prepare_command or "set it to a folder that `nestrec prepare` wrote",
        )
    if Path(cfg.folder, CARD_FILE).exists():
        return
    if cfg.synthetic is None:
        remedy = (
            f"prepare it first: {cfg.prepare_command}" if cfg.prepare_command else "prepare it with `nestrec prepare`"
        )
        if not Path(cfg.folder).is_absolute():
            remedy += f", or change to the folder that contains {cfg.folder} (the current folder is {Path.cwd()})"
        raise UserError(
            "the folder does not contain a prepared dataset", option="data.folder", value=cfg.folder, remedy=remedy
        )
    generate(preset(cfg.synthetic), Path(cfg.folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowEnd:
    """Argument of window hooks: a time window was evaluated, trained on and saved."""

    session: Session
    """Data, tables and dense weights after the window; no step is in flight."""
    state: TrainState
    """Training progress; the checkpoint is that of `state.step`."""
    number: int
    """Index of the window in this run, from 0."""
    from_ms: int
    """Time of the first event, in Unix milliseconds."""
    to_ms: int
    """Time of the last event, in Unix milliseconds."""
    num_events: int
    """Number of events in the window."""
    read_at_s: float | None = None
    """Time at which the newest event was read from the stream, in Unix seconds; None without a stream."""
    first_at_s: float | None = None
    """Time at which the oldest event arrived at the source, in Unix seconds; None without a stream."""
    mean_at_s: float | None = None
    """Mean arrival time of the events at the source, in Unix seconds; None without a stream."""
    closed_at_s: float | None = None
    """Time at which the window was closed, in Unix seconds; None without a stream."""
    is_restart: bool = False
    """Whether the run resumed at the end of this window; the hooks may or may not have been called before."""


def check_has_windows(windows: Sequence[TimeWindow], start_ms: int, source_run: Path | None) -> None:
    """Raise a UserError if there are no training events from the start time onward.

    Args:
        windows: The time windows.
        start_ms: Start time in Unix milliseconds; 0 for all events.
        source_run: Run whose newest event determines the start time; that event may have a wrong time.
    """
    if windows or not start_ms:
        return
    moment = format_iso_time(start_ms)
    why = "" if source_run is None else f", because {source_run} was trained on an event just before that time"
    raise UserError(
        f"there are no training events from this time onward{why}",
        option="windows.start_time",
        value=moment,
        remedy="append newer events (the latest ones may be held out, see task.split), or set --windows.start_time to "
        "the time from which events are new",
    )


WindowHook = Callable[[WindowEnd], None]
"""Function that is called on every rank at the end of a time window; it must be idempotent."""
