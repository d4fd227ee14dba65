"""Checkpoints of a model of one's own: what a `TrainingPipeline` has learnt, saved whole and taken back.

The files are those of runs: see nestrec.checkpoint.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from nestrec.base.config import to_plain
from nestrec.base.errors import UserError
from nestrec.base.files import given_path
from nestrec.checkpoint import IDENTITY, CheckpointGroup, CheckpointManager, LoadedCheckpoint, RankCheckpoint
from nestrec.checkpoint.table_checkpointer import TableCheckpointer
from nestrec.embedding import TableConfig
from nestrec.pipeline.training_pipeline import TrainingPipeline

T = TypeVar("T")

_OURS, _THEIRS = "pipeline", "state"
"""Parts of the state of a checkpoint."""
_BUFFER = "buffer/"
_FREE = ("num_rows", "features", "half_features", "half_dtype", "store", "placement", "optimizer")
"""Fields of a table that may be others when it is taken back, or that are looked at by themselves."""


class PipelineCheckpoints:
    """The checkpoints of one pipeline in one folder.

        saved = nestrec.PipelineCheckpoints(pipeline, "checkpoints/mine")
        state = saved.restore() or {"seen": 0}                      # none: nothing was saved yet
        for loss in pipeline.run(itertools.islice(batches(first=state["seen"]), 1000)):
            ...
        saved.save({"seen": state["seen"] + 1000})

    A checkpoint holds the rows of all tables with their optimiser state, the weights and buffers of the model, the
    state of its optimiser, and the number of steps made. It is taken back on any number of ranks, with any store,
    placement and schedule; on as many ranks, training goes on with the same bits.
    """

    def __init__(self, pipeline: TrainingPipeline, folder: Path | str, *, keep: int = 1) -> None:
        """Collective: every rank makes one, with the same folder, which all of them see.

        keep: newest checkpoints that stay; older ones are deleted.
        """
        _check_pipeline(pipeline)
        if isinstance(keep, bool) or not isinstance(keep, int):
            raise UserError("must be a whole number from 1", option="keep", value=keep, remedy="such as 2")
        self._pipeline = pipeline
        self._dense = pipeline.dense
        self._tables = TableCheckpointer(pipeline.engine)
        self._checkpoints = CheckpointManager(
            given_path(folder, "folder"), keep=keep, peers=CheckpointGroup.of_topology(pipeline.topology)
        )
        self._course = secrets.token_hex(8)

    def save(self, state: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint of what was learnt so far; its folder. Collective, between steps: after the loop over
        `run`, or inside it at a fence (`fence_every`).

        state: what the script needs to go on besides, such as which batches were seen and `scheduler.state_dict()`:
        text, numbers, lists, and mappings with text as names. It is that of the first rank. Tuples come back as lists.
        A save that fails leaves the last checkpoint whole; weights that are not finite are not saved.
        """
        pipeline = self._pipeline
        engine = self._pipeline.engine
        pipeline.check_whole()
        told = _as_json(state or {}, "state")
        topology = pipeline.topology
        number = pipeline.number
        tables = {name: to_plain(table) for name, table in engine.tables.items()}
        content = RankCheckpoint(
            tensors=self._tensors(),
            state={
                _OURS: {"tables": tables, "optimizer": self._dense.settings()},
                _THEIRS: told,
                IDENTITY: [self._course, told],  # the same step of this training, told the same: it is there already
            },
            tables=self._tables.rows(number, None, None) if topology.replica == 0 else {},
            shard=(topology.shard, topology.num_shards),
            close=self._tables.thaw,
        )
        path = self._checkpoints.save(number, content)
        self._tables.build_on(number)
        return path

    def restore(self) -> dict[str, Any] | None:
        """Take back the newest checkpoint that is whole; the `state` it was saved with, or none where there is none.

        Collective, between steps, mostly before the first. All that the pipeline has learnt until then is forgotten,
        and `pipeline.number` is the step of the checkpoint. One of another model or of other tables is refused.
        """
        pipeline = self._pipeline
        pipeline.check_whole()
        restored = self._checkpoints.restore_latest(self._take)
        if restored is None:
            return None
        self._dense.load({name: restored.tensors[name] for name in restored.tensors if not name.startswith(_BUFFER)})
        self._dense.load_settings(restored.state[_OURS]["optimizer"])
        for name, buffer in self._dense.buffers().items():
            buffer.copy_(restored.tensors[_BUFFER + name])
        self._tables.settle()
        pipeline.number = restored.step
        self._course = secrets.token_hex(8)
        state: dict[str, Any] = restored.state[_THEIRS]
        return state

    def _take(self, restored: LoadedCheckpoint) -> None:
        self._check(restored)
        self._tables.take(restored)

    def _check(self, restored: LoadedCheckpoint) -> None:
        """Refuse what is of another model, before anything is changed."""
        where = str(restored.path)
        if _OURS not in restored.state:
            remedy = "name a folder that PipelineCheckpoints.save wrote; `nestrec train` goes on with its runs itself"
            raise UserError("is a checkpoint of a run, not of a pipeline", option="folder", value=where, remedy=remedy)
        ours = restored.state[_OURS]
        tables = self._pipeline.engine.tables
        _same("tables", sorted(ours["tables"]), sorted(tables), where)
        for name, table in tables.items():
            _check_table(table, ours["tables"][name], where)
        for name, before, now in _pairs(_shapes(restored.tensors), _shapes(self._tensors())):
            _same(f"shape of {name.partition('/')[2]}", before, now, where)
        saved, mine = _of_optimizer(ours["optimizer"]), _of_optimizer(self._dense.settings())
        _same("dense_optimizer", saved[0], mine[0], where)
        _same("groups of dense_optimizer", saved[1], mine[1], where)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Weights, what the optimiser keeps of them, buffers. Collective where layers are sharded."""
        return self._dense.tensors() | {_BUFFER + name: buffer for name, buffer in self._dense.buffers().items()}


def _check_pipeline(pipeline: Any) -> None:
    if not isinstance(pipeline, TrainingPipeline):
        remedy = "give the nestrec.TrainingPipeline of a module"
        raise UserError("is no pipeline of a module", option="pipeline", value=pipeline, remedy=remedy)


def _of_optimizer(settings: Mapping[str, Any]) -> tuple[str, int]:
    """Its class, and the number of its groups of weights."""
    return settings["kind"], len(settings.get("groups", ()))


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """Of what a model is made of."""
    return {name: list(tensors[name].shape) for name in tensors if name.startswith(("model/", _BUFFER))}


def _check_table(mine: TableConfig, saved: Mapping[str, Any], where: str) -> None:
    """Its rows are those that the table here would have made, and fit into it."""
    name = f"tables.{mine.name}"
    plain = to_plain(mine)
    for field, before, now in _pairs(saved, plain):
        if field not in _FREE:
            _same(f"{name}.{field}", before, now, where)
    _same(f"{name}.optimizer", saved["optimizer"]["kind"], mine.optimizer.kind, where)
    may_grow = mine.num_rows is not None and saved["num_rows"] is not None and not mine.is_hashed
    if not may_grow or saved["num_rows"] > mine.num_rows:
        _same(f"{name}.rows", saved["num_rows"], mine.num_rows, where)


def _pairs(saved: Mapping[str, T], mine: Mapping[str, T]) -> list[tuple[str, T | None, T | None]]:
    return [(name, saved.get(name), mine.get(name)) for name in sorted(saved.keys() | mine.keys())]


def _same(field: str, saved: Any, mine: Any, where: str) -> None:
    if saved != mine:
        raise UserError(
            f"is {saved!r} in the checkpoint {where}",
            option=field,
            value=mine,
            remedy="build the pipeline as the one that was saved, or name another folder",
        )


def _as_json(value: Any, name: str) -> Any:
    """The same as JSON gives it back; what would come back as something else is refused."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _as_json(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(inner, f"{name}[{number}]") for number, inner in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | int | float | bool):
        return value
    remedy = "give text, numbers, lists, and mappings with text as names; tensors may be buffers of the model"
    raise UserError("is nothing that a checkpoint holds", option=name, value=value, remedy=remedy)
