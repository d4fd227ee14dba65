"""The parts of a run, put together: data, task, tables, dense weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from nestrec.base.errors import UserError
from nestrec.checkpoint import Content, Restored
from nestrec.data.dataset import Dataset
from nestrec.data.synthetic import generate, preset
from nestrec.distributed import Topology
from nestrec.distributed.exchange import barrier
from nestrec.embedding import EmbeddingEngine
from nestrec.training.config import DataConfig, RunConfig, TaskConfig
from nestrec.training.dense import DenseUpdate
from nestrec.training.state import TrainState
from nestrec.training.tasks.ranking import RankingTask, RankingTaskConfig
from nestrec.training.tasks.retrieval import RetrievalTask, RetrievalTaskConfig
from nestrec.training.tasks.rows import RowsTask
from nestrec.training.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Session:
    """What training and evaluation share."""

    cfg: RunConfig
    topology: Topology
    dataset: Dataset
    task: Task
    engine: EmbeddingEngine
    dense: DenseUpdate

    @staticmethod
    def open(cfg: RunConfig, topology: Topology) -> "Session":
        dataset = open_data(cfg.data, topology)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(cfg.training.seed)
            task = make_task(cfg.task, dataset, seed=cfg.training.seed, dtype=cfg.training.dtype)
        task.model.to(device=topology.device, dtype=getattr(torch, cfg.training.dtype))
        engine = EmbeddingEngine(task.tables, topology, topology.device)
        return Session(
            cfg=cfg, topology=topology, dataset=dataset, task=task, engine=engine,
            dense=DenseUpdate(task.model, cfg.optimizer, topology, topology.device),
        )  # fmt: skip

    def content(self, state: TrainState, base: int | None = None) -> Content:
        """Everything that a checkpoint holds; with `base` only the rows used after that step."""
        since = -1 if base is None else base
        owns_copy = self.topology.replica == 0
        tables = {name: self.engine.snapshot(name, since=since) for name in self.engine.tables} if owns_copy else {}
        return Content(
            tensors=self.dense.tensors(), state={"train": state.to_plain()}, tables=tables, base=base,
            shard=(self.topology.shard, self.topology.num_shards),
        )  # fmt: skip

    def restore(self, restored: Restored) -> TrainState:
        """Take back what `content` gave, on any number of ranks."""
        self.dense.load(restored.tensors)
        for table in self.engine.tables:
            self.engine.load(table, restored.rows(table, shard=(self.topology.shard, self.topology.num_shards)))
        return TrainState.from_plain(restored.state["train"])


def make_task(cfg: TaskConfig, dataset: Dataset, *, seed: int, dtype: Literal["float32", "float64"]) -> Task:
    if isinstance(cfg, RetrievalTaskConfig):
        return RetrievalTask(cfg, dataset, seed=seed, dtype=dtype)
    if isinstance(cfg, RankingTaskConfig):
        return RankingTask(cfg, dataset, seed=seed, dtype=dtype)
    return RowsTask(cfg, dataset, seed=seed, dtype=dtype)


def open_data(cfg: DataConfig, topology: Topology) -> Dataset:
    """The prepared dataset; a synthetic one is generated first where it is missing."""
    if not cfg.folder:
        raise UserError(
            "no dataset is named", field="data.folder", value="", remedy=cfg.prepare or "name a prepared folder"
        )
    if not Path(cfg.folder, "card.json").exists():
        if cfg.synthetic is None:
            remedy = f"make it first: {cfg.prepare}" if cfg.prepare else "make it with `nestrec prepare`"
            raise UserError("there is no prepared dataset here", field="data.folder", value=cfg.folder, remedy=remedy)
        if topology.is_first:
            generate(preset(cfg.synthetic), Path(cfg.folder))
        barrier(topology.control)
    return Dataset.open(cfg.folder)
