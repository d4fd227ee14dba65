"""What a recipe asks for, taken from its own parts: the assembled samples of its data, its tables, its model.

Nothing of the tables is allocated, and the model is made without memory.

Loads expected from distributions: lengths are drawn and dealt by the real balance policy, distinct keys follow the
counted curve, and owners of a shard differ as hashing makes them differ.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.balance import CostModel, partition
from nestrec.base.errors import require
from nestrec.data.batch_loader import MicroBatch
from nestrec.data.batch_order import contiguous
from nestrec.distributed import Topology
from nestrec.embedding import TableConfig
from nestrec.embedding.table_config import layout_of
from nestrec.planning.simulator.program_replay import Mesh
from nestrec.planning.workload import Amounts, Loads, TableLoad, Workload
from nestrec.tasks.table_overrides import tables_with
from nestrec.tasks.task import Task, TrainingCost
from nestrec.tasks.task_registry import TASKS, make_task
from nestrec.training.run_config import RunConfig
from nestrec.training.training_session import open_data

PATTERN_STEPS = 3
_SLOW_POLICIES_UP_TO = 200_000
"""Samples of a global batch that the costly policies are asked to deal; of a larger one as many ranks are dealt at a
time as fit."""


def expected_loads(
    workload: Workload, mesh: Mesh, *, micro_batches: int, policy: str, window_cache: bool = False, seed: int = 0
) -> Loads:
    """A few steps of all ranks."""
    steps = [_dealt(workload, mesh.world, micro_batches, policy, (seed, p)) for p in range(PATTERN_STEPS)]
    tokens, squares = (np.stack([step[i] for step in steps]) for i in (0, 1))
    parts = [_table(table, tokens, mesh, window_cache=window_cache, seed=seed) for table in workload.tables]
    summed = {name: sum((part[name] for part in parts), np.zeros(())) for name in parts[0]}
    return Loads(
        linear_flops=tokens * workload.flops_a_token,
        attention_flops=squares * workload.flops_a_token_squared,
        dense_bytes=4.0 * workload.dense_parameters,
        **summed,
    )


def _dealt(
    workload: Workload, world: int, micro_batches: int, policy: str, seed: tuple[int, int]
) -> tuple[Amounts, Amounts]:
    """(R, N) tokens and sums of squared lengths."""
    cost_of = CostModel(token=max(workload.flops_a_token, 1e-9), token_squared=workload.flops_a_token_squared)
    lengths = workload.draw_lengths(workload.batch_samples, seed)
    tokens, squares = np.zeros((world, micro_batches)), np.zeros((world, micro_batches))
    for rank, mine in enumerate(_ranks(lengths, cost_of, world, policy)):
        for n, part in enumerate(_micro_batches(cost_of.of(lengths[mine]), micro_batches, policy)):
            tokens[rank, n] = lengths[mine][part].sum()
            squares[rank, n] = (lengths[mine][part] ** 2).sum()
    return tokens, squares


def _ranks(lengths: NDArray[np.float64], cost_of: CostModel, world: int, policy: str) -> list[NDArray[np.int64]]:
    if policy == "fixed":
        return contiguous(len(lengths), world)
    pieces = -(-len(lengths) // _SLOW_POLICIES_UP_TO)
    found = []
    for samples, ranks in zip(contiguous(len(lengths), pieces), contiguous(world, pieces), strict=True):
        groups = partition(policy, cost_of.of(lengths[samples]), len(ranks), lengths=lengths[samples])
        found += [samples[group] for group in groups]
    return found


def _micro_batches(cost: NDArray[np.float64], num_micro_batches: int, policy: str) -> list[NDArray[np.int64]]:
    """As the dealer cuts: in order without a policy, else of near equal cost, the costliest first."""
    if policy == "fixed":
        return contiguous(len(cost), num_micro_batches)
    order = np.argsort(-cost, kind="stable")
    place = np.arange(len(cost)) % (2 * num_micro_batches)
    assignment = np.minimum(place, 2 * num_micro_batches - 1 - place)
    return [order[assignment == n] for n in range(num_micro_batches)]


def _table(table: TableLoad, tokens: Amounts, mesh: Mesh, *, window_cache: bool, seed: int) -> dict[str, Any]:
    """Amounts of one table: (P, R) or (P, R, N)."""
    keys = tokens * table.keys_a_token
    asked = table.distinct(keys)
    returned = asked
    if window_cache:
        asked = _new_keys(table, keys)
        returned = _new_keys(table, keys[..., ::-1])[..., ::-1]
    uneven = _unevenness(table, keys, mesh, seed)
    served, summed = _served(asked, mesh) * uneven[..., None], _served(returned, mesh) * uneven[..., None]
    everyone = np.broadcast_to(keys.sum(axis=(1, 2), keepdims=True)[..., 0], keys.shape[:2])
    distinct = table.distinct(everyone)
    rows = distinct / mesh.num_shards * uneven
    shared = np.maximum(0.0, 2 * distinct - table.distinct(2 * everyone)) / mesh.num_shards * uneven
    of_group = np.stack([_group_sum(keys[..., n], mesh) for n in range(keys.shape[2])], axis=2)
    completed = _new_keys(table, of_group[..., ::-1])[..., ::-1] / mesh.num_shards
    return {
        "keys": keys.sum(axis=2),
        "asked": asked,
        "received_bytes": asked * table.weight_bytes,
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
    """Distinct keys that no earlier micro-batch had."""
    total = table.distinct(np.cumsum(keys, axis=2))
    return np.diff(total, axis=2, prepend=0.0)


def _grid(values: Amounts, mesh: Mesh) -> Amounts:
    return values.reshape(values.shape[0], mesh.num_replicas, mesh.num_shards, *values.shape[2:])


def _served(asked: Amounts, mesh: Mesh) -> Amounts:
    """What an owner sends: an equal part of what the sources of its group ask for."""
    grid = _grid(asked, mesh)
    mean = np.broadcast_to(grid.mean(axis=2, keepdims=True), grid.shape)
    return mean.reshape(asked.shape)


def _group_sum(values: Amounts, mesh: Mesh) -> Amounts:
    grid = _grid(values, mesh)
    return np.broadcast_to(grid.sum(axis=2, keepdims=True), grid.shape).reshape(values.shape)


def _unevenness(table: TableLoad, keys: Amounts, mesh: Mesh, seed: int) -> Amounts:
    """(P, R) how much more than its part an owner has: a hot key is asked for by every source, and lies in one place.

    With a distinct keys of a source and u of the group, a key is asked for by about s a / u of s sources; u keys thrown
    on s owners make their loads differ by about the root of s / u.
    """
    group = _group_sum(keys.sum(axis=2), mesh)
    spread = np.sqrt(mesh.num_shards / np.maximum(table.distinct(group), 1.0)) if mesh.num_shards > 1 else 0.0 * group
    draw = np.random.default_rng([seed, table.rows % (2**31)]).standard_normal(mesh.world)
    return np.maximum(0.1, 1.0 + np.minimum(spread, 1.0) * draw)


NUM_QUANTILES = 257
_SAMPLES_COUNTED = 4096
_POINTS = (8, 32, 128, 512, 2048, 4096)


def workload_of(cfg: RunConfig) -> Workload:
    """Counts the keys of some thousand samples of the recipe's data; a synthetic dataset is generated if missing."""
    dataset = open_data(cfg.data, Topology.single())
    with torch.device("meta"):
        task = make_task(cfg.task, dataset, seed=cfg.training.seed, dtype=cfg.training.dtype, tables=cfg.tables)
    tokens = task.assembler.tokens[task.assembler.tokens > 0]
    require(len(tokens), "has no samples", option="data.folder", value=cfg.data.folder, remedy="prepare it again")
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
