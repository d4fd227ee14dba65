"""Effect of balance policies on unique keys: a row that several ranks or micro-batches need is fetched by each of them.

A policy that moves samples between ranks changes which ranks share keys. Without a window cache, an exchange transfers
the sum of unique keys over ranks and over micro-batches. Clustering is applied in addition.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance import POLICIES, TOKENS, micro_partition, partition
from nestrec.data.batch_order import epoch_order, split_contiguous
from nestrec.data.dataset import Dataset, DatasetRows
from nestrec.data.synthetic.synthetic_logs import generate, preset
from nestrec.data.synthetic.synthetic_logs import lengths as draw_lengths
from nestrec.pipeline.key_clustering import Clustering, SampleKeys, cluster

Row = dict[str, Any]
CLUSTERING: Clustering = "refined"
MOST_EVENTS = 4_000_000
"""Maximum number of synthetic events."""


def unique_key_rows(
    lengths: str, ranks: int, batch: int, *, rounds: int = 10, micro_batches: int = 4, seed: int = 0
) -> list[Row]:
    """Count the unique keys of each policy on global batches of a preset or a prepared dataset.

    Args:
        lengths: A preset or the folder of a prepared dataset.
        ranks: Number of ranks.
        batch: Number of samples per rank.
        rounds: Number of global batches. Fewer batches are generated if they are large.
        micro_batches: Number of micro-batches per rank.
        seed: Random seed of the sample order.

    Returns:
        One row per policy with means over the global batches; empty if one synthetic batch would exceed `MOST_EVENTS`.
    """
    if not Path(lengths).is_dir():
        events = ranks * batch * float(draw_lengths(lengths, 1000, seed).mean())
        rounds = min(rounds, int(MOST_EVENTS / events))
        if rounds == 0:
            return []
    with tempfile.TemporaryDirectory(prefix="nestrec-keys-") as folder:
        data = Path(lengths)
        if not data.is_dir():
            data = Path(folder) / "data"
            shape = preset(lengths, num_users=ranks * batch * rounds, num_items=preset(lengths).num_items)
            generate(shape, data)
        dataset = Dataset.open(data, columns=["item_ids"])
        order = epoch_order(dataset.num_samples, seed, 0)[: ranks * batch * rounds]
        batches = [dataset.rows(chosen) for chosen in np.array_split(order, rounds)]
    common = {"lengths": lengths, "ranks": ranks, "batch": batch, "rounds": rounds, "micro_batches": micro_batches}
    found = {policy: [_counts(rows, policy, ranks, micro_batches) for rows in batches] for policy in POLICIES}
    baseline = np.mean(found["fixed"], axis=0)
    return [{"policy": policy, **common, **_row(np.mean(counts, axis=0), baseline)} for policy, counts in found.items()]


def with_unique_keys(rows: Sequence[Row], found: Sequence[Row]) -> list[Row]:
    """Return the rows of a benchmark with unique keys, which are added for the cost `tokens` without noise.

    Args:
        rows: Rows of the benchmark.
        found: Rows of `unique_key_rows`, matched by lengths, ranks and policy.
    """
    by_setting = {(row["lengths"], row["ranks"], row["policy"]): row for row in found}
    merged = []
    for row in rows:
        keys = by_setting.get((row["lengths"], row["ranks"], row["policy"]))
        is_plain = row.get("cost") == "tokens" and row["noise"] == "none"
        merged.append({**row, **{k: v for k, v in keys.items() if k not in row}} if keys and is_plain else row)
    return merged


def _counts(rows: DatasetRows, policy: str, ranks: int, micro_batches: int) -> tuple[int, ...]:
    """Return numbers of unique keys: of the batch, and sums over ranks and over three kinds of micro-batches.

    The micro-batches are contiguous, of equal cost, or clustered by key.
    """
    tokens = np.diff(rows.lists["item_ids"][1])
    groups = partition(policy, TOKENS.sample_costs(tokens), ranks, lengths=tokens)
    in_order = [group[part] for group in groups for part in split_contiguous(group.size, micro_batches)]
    equal = [
        group[part] for group in groups for part in micro_partition(TOKENS.sample_costs(tokens[group]), micro_batches)
    ]
    clustered = [group[part] for group in groups for part in _clustered(rows, group, micro_batches)]
    all_rows = [np.arange(rows.num_rows)]
    return tuple(_unique(rows, parts) for parts in (all_rows, groups, in_order, equal, clustered))


def _clustered(rows: DatasetRows, group: NDArray[np.int64], micro_batches: int) -> list[NDArray[np.int64]]:
    """Return the micro-batches of a rank by the clustering of training, which also balances their costs."""
    values, offsets = rows.take(group).lists["item_ids"]
    keys = SampleKeys(values.astype(np.int64), offsets)
    return cluster(CLUSTERING, keys, TOKENS.sample_costs(np.diff(offsets)), micro_batches)


def _unique(rows: DatasetRows, parts: Sequence[NDArray[np.int64]]) -> int:
    return sum(int(np.unique(rows.take(part).lists["item_ids"][0]).size) for part in parts)


def _row(counts: NDArray[np.float64], baseline: NDArray[np.float64]) -> Row:
    of_batch, of_ranks, of_order, of_equal, of_clustered = counts.tolist()
    return {
        "unique_keys_batch": of_batch,
        "unique_keys_ranks": of_ranks,
        "unique_keys_micro_batches": of_equal,
        "unique_keys_micro_batches_in_order": of_order,
        "over_fixed_ranks": of_ranks / float(baseline[1]) - 1.0,
        "over_fixed_micro_batches": of_equal / float(baseline[2]) - 1.0,
        "unique_keys_clustered": of_clustered,
        "over_fixed_clustered": of_clustered / float(baseline[4]) - 1.0,
    }
