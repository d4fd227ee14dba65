"""Checkpoints of custom models that are trained with a `TrainingPipeline`.

The files have the format of the checkpoints of runs; see nestrec.checkpoint.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from nestrec.base.config import to_plain
from nestrec.base.errors import UserError
from nestrec.base.files import parse_path
from nestrec.base.renamed_fields import with_present_names
from nestrec.checkpoint import IDENTITY, CheckpointGroup, CheckpointManager, LoadedCheckpoint, RankCheckpoint
from nestrec.checkpoint.table_checkpointer import TableCheckpointer
from nestrec.embedding import TableConfig
from nestrec.pipeline.training_pipeline import TrainingPipeline

T = TypeVar("T")

_PIPELINE_STATE, _SCRIPT_STATE = "pipeline", "state"
"""Parts of the state of a checkpoint."""
_BUFFER = "buffer/"
_FIELDS_THAT_MAY_CHANGE = (
    "num_rows",
    "features",
    "half_precision_features",
    "half_dtype",
    "store",
    "placement",
    "optimizer",
)
"""Fields of a table that may change between save and restore, or that are compared separately."""


class PipelineCheckpoints:
    """Checkpoints of one pipeline in one folder.

        saved = nestrec.PipelineCheckpoints(pipeline, "checkpoints/mine")
        state = saved.restore() or {"seen": 0}                      # None if nothing has been saved yet
        for loss in pipeline.run(itertools.islice(batches(first=state["seen"]), 1000)):
            ...
        saved.save({"seen": state["seen"] + 1000})

    A checkpoint contains the rows of all tables with their optimizer states, the weights and buffers of the model, the
    state of its optimizer, and the number of completed steps. It can be restored on any number of ranks, with any
    store, placement and schedule; on the same number of ranks, training is bitwise identical to an uninterrupted run.
    """

    def __init__(self, pipeline: TrainingPipeline, folder: Path | str, *, keep: int = 1) -> None:
        """Create the checkpoints of a pipeline. Collective: every rank passes the same shared folder.

        Args:
            pipeline: Pipeline to save and restore.
            folder: Folder of the checkpoints, visible to all ranks.
            keep: Number of newest checkpoints to retain; older ones are deleted.
        """
        _check_pipeline(pipeline)
        if isinstance(keep, bool) or not isinstance(keep, int):
            raise UserError(
                "must be a positive integer", option="keep", value=keep, remedy="set keep to 2, for example"
            )
        self._pipeline = pipeline
        self._dense = pipeline.dense
        self._tables = TableCheckpointer(pipeline.engine)
        self._checkpoints = CheckpointManager(
            parse_path(folder, "folder"), keep=keep, peers=CheckpointGroup.of_topology(pipeline.topology)
        )
        self._course = secrets.token_hex(8)

    def save(self, state: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint of the current weights, rows and optimizer states. Collective.

        Call it between steps: after the loop over `run`, or inside the loop at a fence (`fence_every`). If a save
        fails, the last checkpoint remains intact.

        Args:
            state: Additional state that the script needs to resume, such as the position in the data and
                `scheduler.state_dict()`: strings, numbers, lists, and mappings with strings as keys. The state of the
                first rank is saved. Tuples are restored as lists.

        Returns:
            The folder of the checkpoint.

        Raises:
            NonFiniteError: A weight or row is not finite.
        """
        pipeline = self._pipeline
        engine = self._pipeline.engine
        pipeline.check_idle()
        script_state = _as_json(state or {}, "state")
        topology = pipeline.topology
        number = pipeline.number
        tables = {name: to_plain(table) for name, table in engine.tables.items()}
        content = RankCheckpoint(
            tensors=self._tensors(),
            state={
                _PIPELINE_STATE: {"tables": tables, "optimizer": self._dense.settings()},
                _SCRIPT_STATE: script_state,
                IDENTITY: [self._course, script_state],  # an equal identity means that this step is already saved
            },
            tables=self._tables.rows(number, None, None) if topology.replica == 0 else {},
            shard=(topology.shard, topology.num_shards),
            close=self._tables.release_snapshots,
        )
        path = self._checkpoints.save(number, content)
        self._tables.set_base(number)
        return path

    def restore(self) -> dict[str, Any] | None:
        """Restore the newest intact checkpoint. Collective.

        Call it between steps, usually before the first one. It replaces everything that the pipeline has learned, and
        sets `pipeline.number` to the step of the checkpoint.

        Returns:
            The `state` that was saved with the checkpoint, or None if there is no checkpoint.

        Raises:
            UserError: The checkpoint is that of another model or of other tables.
        """
        pipeline = self._pipeline
        pipeline.check_idle()
        restored = self._checkpoints.restore_latest(self._load_rows)
        if restored is None:
            return None
        self._dense.load({name: restored.tensors[name] for name in restored.tensors if not name.startswith(_BUFFER)})
        self._dense.load_settings(restored.state[_PIPELINE_STATE]["optimizer"])
        for name, buffer in self._dense.buffers().items():
            buffer.copy_(restored.tensors[_BUFFER + name])
        self._tables.rebalance_capacity()
        pipeline.number = restored.step
        self._course = secrets.token_hex(8)
        state: dict[str, Any] = restored.state[_SCRIPT_STATE]
        return state

    def _load_rows(self, restored: LoadedCheckpoint) -> None:
        self._check(restored)
        self._tables.load_rows(restored)

    def _check(self, restored: LoadedCheckpoint) -> None:
        """Raise a UserError if the checkpoint is that of another model, before anything is changed."""
        where = str(restored.path)
        if _PIPELINE_STATE not in restored.state:
            remedy = "pass a folder written by PipelineCheckpoints.save; `nestrec train` resumes its runs itself"
            raise UserError(
                "the checkpoint is of a run, not of a pipeline", option="folder", value=where, remedy=remedy
            )
        saved_state = restored.state[_PIPELINE_STATE]
        tables = self._pipeline.engine.tables
        _check_equal("tables", sorted(saved_state["tables"]), sorted(tables), where)
        for name, table in tables.items():
            _check_table(table, saved_state["tables"][name], where)
        for name, before, now in _pairs(_shapes(restored.tensors), _shapes(self._tensors())):
            _check_equal(f"shape of {name.partition('/')[2]}", before, now, where)
        saved_optimizer, current_optimizer = (
            _optimizer_summary(saved_state["optimizer"]),
            _optimizer_summary(self._dense.settings()),
        )
        _check_equal("dense_optimizer", saved_optimizer[0], current_optimizer[0], where)
        _check_equal("groups of dense_optimizer", saved_optimizer[1], current_optimizer[1], where)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return weights, optimizer states and buffers by name. Collective with FSDP."""
        return self._dense.tensors() | {_BUFFER + name: buffer for name, buffer in self._dense.buffers().items()}


def _check_pipeline(pipeline: Any) -> None:
    if not isinstance(pipeline, TrainingPipeline):
        remedy = "pass the nestrec.TrainingPipeline of a module"
        raise UserError("must be a nestrec.TrainingPipeline", option="pipeline", value=pipeline, remedy=remedy)


def _optimizer_summary(settings: Mapping[str, Any]) -> tuple[str, int]:
    """Return the class of the optimizer and the number of its parameter groups."""
    return settings["kind"], len(settings.get("groups", ()))


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """Return the shapes of the weights and buffers of a model."""
    return {name: list(tensors[name].shape) for name in tensors if name.startswith(("model/", _BUFFER))}


def _check_table(current: TableConfig, saved: Mapping[str, Any], where: str) -> None:
    """Raise a UserError if the saved rows of a table do not fit the table of the pipeline."""
    name = f"tables.{current.name}"
    plain = to_plain(current)
    saved = with_present_names(TableConfig, saved)
    for field, before, now in _pairs(saved, plain):
        if field not in _FIELDS_THAT_MAY_CHANGE:
            _check_equal(f"{name}.{field}", before, now, where)
    _check_equal(f"{name}.optimizer", saved["optimizer"]["kind"], current.optimizer.kind, where)
    may_grow = current.num_rows is not None and saved["num_rows"] is not None and not current.is_hashed
    if not may_grow or saved["num_rows"] > current.num_rows:
        _check_equal(f"{name}.num_rows", saved["num_rows"], current.num_rows, where)


def _pairs(saved: Mapping[str, T], current: Mapping[str, T]) -> list[tuple[str, T | None, T | None]]:
    return [(name, saved.get(name), current.get(name)) for name in sorted(saved.keys() | current.keys())]


def _check_equal(field: str, saved: Any, current: Any, where: str) -> None:
    if saved != current:
        raise UserError(
            f"the value is {saved!r} in the checkpoint {where}",
            option=field,
            value=current,
            remedy="build the pipeline like the saved one, or choose another folder",
        )


def _as_json(value: Any, name: str) -> Any:
    """Return the value as JSON would restore it; raise a UserError if JSON cannot represent it."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _as_json(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(inner, f"{name}[{number}]") for number, inner in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | int | float | bool):
        return value
    remedy = "use strings, numbers, lists, and mappings with string keys; register tensors as buffers of the model"
    raise UserError("a checkpoint cannot store this value", option=name, value=value, remedy=remedy)
