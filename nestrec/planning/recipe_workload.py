"""What a recipe asks for, taken from its own parts: the assembled samples of its data, its tables, its model.

Nothing of the tables is allocated, and the model is made without memory.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.data.batches import MicroBatch
from nestrec.distributed import Topology
from nestrec.embedding import TableConfig
from nestrec.embedding.table import layout_of
from nestrec.planning.workload import TableLoad, Workload
from nestrec.tasks.built_in import TASKS, make_task
from nestrec.tasks.table_options import tables_with
from nestrec.tasks.task import Task, TrainingCost
from nestrec.training.config import RunConfig
from nestrec.training.session import open_data

NUM_QUANTILES = 257
_SAMPLES_COUNTED = 4096
_POINTS = (8, 32, 128, 512, 2048, 4096)


def workload_of(cfg: RunConfig) -> Workload:
    """Counts the keys of some thousand samples of the recipe's data; a synthetic dataset is generated if missing."""
    dataset = open_data(cfg.data, Topology.single())
    with torch.device("meta"):
        task = make_task(cfg.task, dataset, seed=cfg.training.seed, dtype=cfg.training.dtype, tables=cfg.tables)
    tokens = task.assembler.tokens[task.assembler.tokens > 0]
    if not len(tokens):
        raise UserError("has no samples", field="data.folder", value=cfg.data.folder, remedy="prepare it again")
    lengths = np.quantile(tokens, np.linspace(0, 1, NUM_QUANTILES))
    parameters = sum(p.numel() for p in task.model.parameters())
    cost = cost_of(cfg, task)
    # The backward pass takes twice the forward pass.
    linear, squared = (3.0 * flops for flops in cost.flops.of_length(lengths))
    number_bytes = 2.0 if cfg.training.precision in ("bf16", "fp8") else 4.0
    return Workload(
        name=cfg.name,
        batch_samples=_batch_samples(cfg, float(tokens.mean())),
        lengths=tuple(map(float, lengths)),
        tables=tuple(_table_loads(cfg, task, len(tokens))),
        dense_parameters=parameters,
        flops_a_token=linear,
        flops_a_token_squared=squared,
        activation_bytes_a_token=cost.activations * number_bytes,
        may_be_cut=task.couples_samples != "batch",
    )


def cost_of(cfg: RunConfig, task: Task) -> TrainingCost:
    """What a token costs, as the task tells it."""
    if (cost := task.cost()) is None:
        raise TASKS.unanswered(cfg.task.kind, "cost", "what a token costs is not known, so nothing can be planned")
    return cost


def _batch_samples(cfg: RunConfig, mean_tokens: float) -> int:
    if cfg.batch.batch_samples is not None:
        return cfg.batch.batch_samples
    assert cfg.batch.batch_tokens is not None
    return max(1, round(cfg.batch.batch_tokens / mean_tokens))


def _table_loads(cfg: RunConfig, task: Task, num_samples: int) -> list[TableLoad]:
    chosen = np.random.default_rng(cfg.training.seed).permutation(num_samples)[:_SAMPLES_COUNTED]
    points = [n for n in _POINTS if n <= len(chosen)] or [len(chosen)]
    batches = [_assembled(task, np.sort(chosen[:n])) for n in points]
    stay, placed = (tables_with(option, task.tables, cfg.tables) for option in ("store", "placement"))
    return [
        replace(
            _table_load(table, batches),
            keeps_store=table.name in stay,
            placement=table.placement if table.name in placed and table.placement != "auto" else None,
        )
        for table in task.tables
    ]


def _assembled(task: Task, samples: NDArray[np.int64]) -> MicroBatch:
    return task.assembler.assemble(samples, task.assembler.read(samples), 0)


def _table_load(table: TableConfig, batches: list[MicroBatch]) -> TableLoad:
    layout = layout_of(table)
    keys = [_keys_of(batch, table) for batch in batches]
    seen = [max(1.0, float(len(k))) for k in keys]
    distinct = [max(1.0, float(len(np.unique(k)))) for k in keys]
    rows = table.num_rows if table.num_rows is not None else table.store.max_rows or int(distinct[-1])
    return TableLoad(
        name=table.name,
        rows=rows,
        row_bytes=layout.row_bytes,
        weight_bytes=table.dim * table.weight_dtype.itemsize,
        gradient_bytes=table.dim * table.state_dtype.itemsize,
        seen_keys=tuple(seen),
        distinct_keys=tuple(distinct),
        keys_a_token=seen[-1] / max(1, batches[-1].num_tokens),
        has_fixed_rows=table.num_rows is not None,
        store=table.store.kind,
    )


def _keys_of(batch: MicroBatch, table: TableConfig) -> NDArray[np.int64]:
    return np.concatenate([np.asarray(batch.keys[name]).reshape(-1) for name in table.feature_names])
