"""Measures the workload of a recipe and computes the expected work of each rank.

`measure_workload` uses the recipe's own data, tables and model: it collates some thousand samples and counts their
keys. Tables are not allocated, and the model is created on the meta device.

`expected_loads` samples sequence lengths, partitions them with the real balance policy, takes the number of unique keys
from the counted curve, and varies the load of the shard owners as hashing does.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.balance import CostModel, partition
from nestrec.base.errors import require
from nestrec.data.batch_loader import MicroBatch
from nestrec.data.batch_order import split_contiguous
from nestrec.distributed import Topology
from nestrec.embedding import TableConfig
from nestrec.embedding.table_config import layout_of
from nestrec.planning.simulator.program_replay import Mesh
from nestrec.planning.workload import Amounts, Loads, TableLoad, Workload
from nestrec.tasks.table_overrides import tables_with_option
from nestrec.tasks.task import Task, TrainingCost
from nestrec.tasks.task_registry import TASKS, make_task
from nestrec.training.run_config import RunConfig
from nestrec.training.training_session import open_dataset

PATTERN_STEPS = 3
_SLOW_POLICIES_UP_TO = 200_000
"""Maximum number of samples that slow policies partition at once; larger batches are split into blocks of ranks."""


def expected_loads(
    workload: Workload, mesh: Mesh, *, micro_batches: int, policy: str, window_cache: bool = False, seed: int = 0
) -> Loads:
    """Return the expected work of all ranks for a few steps.

    Args:
        workload: The recipe.
        mesh: Device mesh.
        micro_batches: Number of micro-batches of a rank's batch.
        policy: Balance policy.
        window_cache: Whether embeddings are sent once per batch instead of once per micro-batch.
        seed: Seed of the sampled lengths.
    """
    steps = [_partition_batch(workload, mesh.world, micro_batches, policy, (seed, p)) for p in range(PATTERN_STEPS)]
    tokens, squares = (np.stack([step[i] for step in steps]) for i in (0, 1))
    parts = [_table(table, tokens, mesh, window_cache=window_cache, seed=seed) for table in workload.tables]
    summed = {name: sum((part[name] for part in parts), np.zeros(())) for name in parts[0]}
    return Loads(
        linear_flops=tokens * workload.flops_per_token,
        attention_flops=squares * workload.flops_per_token_squared,
        dense_bytes=4.0 * workload.dense_parameters,
        **summed,
    )


def _partition_batch(
    workload: Workload, world: int, micro_batches: int, policy: str, seed: tuple[int, int]
) -> tuple[Amounts, Amounts]:
    """Partition one sampled batch; return the (R, N) tokens and sums of squared lengths."""
    cost_model = CostModel(token=max(workload.flops_per_token, 1e-9), token_squared=workload.flops_per_token_squared)
    lengths = workload.draw_lengths(workload.batch_samples, seed)
    tokens, squares = np.zeros((world, micro_batches)), np.zeros((world, micro_batches))
    for rank, own in enumerate(_ranks(lengths, cost_model, world, policy)):
        for n, part in enumerate(_micro_batches(cost_model.sample_costs(lengths[own]), micro_batches, policy)):
            tokens[rank, n] = lengths[own][part].sum()
            squares[rank, n] = (lengths[own][part] ** 2).sum()
    return tokens, squares


def _ranks(lengths: NDArray[np.float64], cost_model: CostModel, world: int, policy: str) -> list[NDArray[np.int64]]:
    if policy == "fixed":
        return split_contiguous(len(lengths), world)
    num_blocks = -(-len(lengths) // _SLOW_POLICIES_UP_TO)
    result = []
    for samples, ranks in zip(
        split_contiguous(len(lengths), num_blocks), split_contiguous(world, num_blocks), strict=True
    ):
        groups = partition(policy, cost_model.sample_costs(lengths[samples]), len(ranks), lengths=lengths[samples])
        result += [samples[group] for group in groups]
    return result


def _micro_batches(cost: NDArray[np.float64], num_micro_batches: int, policy: str) -> list[NDArray[np.int64]]:
    """Split a rank's batch as the sample partitioner does: in order without a policy, else into micro-batches of nearly
    equal cost, by dealing samples in descending cost back and forth."""
    if policy == "fixed":
        return split_contiguous(len(cost), num_micro_batches)
    order = np.argsort(-cost, kind="stable")
    position = np.arange(len(cost)) % (2 * num_micro_batches)
    assignment = np.minimum(position, 2 * num_micro_batches - 1 - position)
    return [order[assignment == n] for n in range(num_micro_batches)]


def _table(table: TableLoad, tokens: Amounts, mesh: Mesh, *, window_cache: bool, seed: int) -> dict[str, Any]:
    """Return the amounts of one table with shape (P, R) or (P, R, N)."""
    keys = tokens * table.keys_per_token
    requested = table.distinct(keys)
    returned = requested
    if window_cache:
        requested = _new_keys(table, keys)
        returned = _new_keys(table, keys[..., ::-1])[..., ::-1]
    imbalance = _imbalance(table, keys, mesh, seed)
    served, summed = _served(requested, mesh) * imbalance[..., None], _served(returned, mesh) * imbalance[..., None]
    everyone = np.broadcast_to(keys.sum(axis=(1, 2), keepdims=True)[..., 0], keys.shape[:2])
    distinct = table.distinct(everyone)
    rows = distinct / mesh.num_shards * imbalance
    shared = np.maximum(0.0, 2 * distinct - table.distinct(2 * everyone)) / mesh.num_shards * imbalance
    of_group = np.stack([_group_sum(keys[..., n], mesh) for n in range(keys.shape[2])], axis=2)
    completed = _new_keys(table, of_group[..., ::-1])[..., ::-1] / mesh.num_shards
    return {
        "keys": keys.sum(axis=2),
        "requested_keys": requested,
        "received_bytes": requested * table.weight_bytes,
        "returned_bytes": returned * table.gradient_bytes,
        "served_bytes": served * table.weight_bytes,
        "summed_bytes": summed * table.gradient_bytes,
        "rows": rows,
        "row_bytes": rows * table.row_bytes,
        "gradient_bytes": rows * table.gradient_bytes,
        "completed_bytes": completed * table.gradient_bytes,
        "shared_rows": shared,
        "shared_bytes": shared * table.row_bytes,
    }


def _new_keys(table: TableLoad, keys: Amounts) -> Amounts:
    """Return the number of unique keys of each micro-batch that do not occur in an earlier one."""
    total = table.distinct(np.cumsum(keys, axis=2))
    return np.diff(total, axis=2, prepend=0.0)


def _grid(values: Amounts, mesh: Mesh) -> Amounts:
    return values.reshape(values.shape[0], mesh.num_replicas, mesh.num_shards, *values.shape[2:])


def _served(requested: Amounts, mesh: Mesh) -> Amounts:
    """Return what each owner sends: an equal share of the requests of all ranks of its replica group."""
    grid = _grid(requested, mesh)
    mean = np.broadcast_to(grid.mean(axis=2, keepdims=True), grid.shape)
    return mean.reshape(requested.shape)


def _group_sum(values: Amounts, mesh: Mesh) -> Amounts:
    grid = _grid(values, mesh)
    return np.broadcast_to(grid.sum(axis=2, keepdims=True), grid.shape).reshape(values.shape)


def _imbalance(table: TableLoad, keys: Amounts, mesh: Mesh, seed: int) -> Amounts:
    """Return the (P, R) load of each owner relative to an equal share.

    Loads differ because a hot key is requested by every source but stored on one rank. If `a` is the number of unique
    keys per source and `u` that of the group, a key is requested by about s a / u of s sources; u keys hashed to s
    owners make their loads differ by about sqrt(s / u).
    """
    group = _group_sum(keys.sum(axis=2), mesh)
    spread = np.sqrt(mesh.num_shards / np.maximum(table.distinct(group), 1.0)) if mesh.num_shards > 1 else 0.0 * group
    draw = np.random.default_rng([seed, table.rows % (2**31)]).standard_normal(mesh.world)
    return np.maximum(0.1, 1.0 + np.minimum(spread, 1.0) * draw)


NUM_QUANTILES = 257
_SAMPLES_COUNTED = 4096
_POINTS = (8, 32, 128, 512, 2048, 4096)


def measure_workload(cfg: RunConfig) -> Workload:
    """Measure the workload of a recipe on some thousand samples of its data.

    A synthetic dataset is generated if it is missing.

    Raises:
        UserError: The dataset is empty, or the task does not declare its cost.
    """
    dataset = open_dataset(cfg.data, Topology.single())
    with torch.device("meta"):
        task = make_task(cfg.task, dataset, seed=cfg.training.seed, dtype=cfg.training.weight_dtype, tables=cfg.tables)
    tokens = task.collator.tokens[task.collator.tokens > 0]
    require(
        len(tokens),
        "the dataset has no samples",
        option="data.folder",
        value=cfg.data.folder,
        remedy="prepare it again",
    )
    lengths = np.quantile(tokens, np.linspace(0, 1, NUM_QUANTILES))
    parameters = sum(p.numel() for p in task.model.parameters())
    cost = training_cost(cfg, task)
    # The backward pass takes twice the forward pass.
    linear, squared = (3.0 * flops for flops in cost.flops.length_coefficients(lengths))
    number_bytes = 2.0 if cfg.training.precision in ("bf16", "fp8") else 4.0
    return Workload(
        name=cfg.name,
        batch_samples=_batch_samples(cfg, float(tokens.mean())),
        lengths=tuple(map(float, lengths)),
        tables=tuple(_table_loads(cfg, task, len(tokens))),
        dense_parameters=parameters,
        flops_per_token=linear,
        flops_per_token_squared=squared,
        activation_bytes_per_token=cost.activations * number_bytes,
        may_be_cut=task.couples_samples != "batch",
    )


def training_cost(cfg: RunConfig, task: Task) -> TrainingCost:
    """Return the cost per token that the task declares."""
    if (cost := task.cost()) is None:
        raise TASKS.missing_field_error(
            cfg.task.kind, "cost", "the cost of a token is unknown, so that no plan can be made"
        )
    return cost


def _batch_samples(cfg: RunConfig, mean_tokens: float) -> int:
    if cfg.batch.batch_size is not None:
        return cfg.batch.batch_size
    assert cfg.batch.batch_tokens is not None
    return max(1, round(cfg.batch.batch_tokens / mean_tokens))


def _table_loads(cfg: RunConfig, task: Task, num_samples: int) -> list[TableLoad]:
    chosen = np.random.default_rng(cfg.training.seed).permutation(num_samples)[:_SAMPLES_COUNTED]
    points = [n for n in _POINTS if n <= len(chosen)] or [len(chosen)]
    batches = [_collate(task, np.sort(chosen[:n])) for n in points]
    fixed_stores, fixed_placements = (
        tables_with_option(option, task.tables, cfg.tables) for option in ("store", "placement")
    )
    return [
        replace(
            _table_load(table, batches),
            keeps_store=table.name in fixed_stores,
            placement=table.placement if table.name in fixed_placements and table.placement != "auto" else None,
        )
        for table in task.tables
    ]


def _collate(task: Task, samples: NDArray[np.int64]) -> MicroBatch:
    return task.collator.collate(samples, task.collator.read(samples), 0)


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
        keys_per_token=seen[-1] / max(1, batches[-1].num_tokens),
        has_fixed_rows=table.num_rows is not None,
        store=table.store.kind,
    )


def _keys_of(batch: MicroBatch, table: TableConfig) -> NDArray[np.int64]:
    return np.concatenate([np.asarray(batch.keys[name]).reshape(-1) for name in table.feature_names])
