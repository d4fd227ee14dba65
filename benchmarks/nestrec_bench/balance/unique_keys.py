"""What balance costs in unique keys: rows that several ranks or micro-batches need are fetched by each of them.

A policy that moves samples between ranks changes which of them share keys. The sums over ranks and over micro-batches
of their unique keys are what exchanges carry without a window cache; clustering works on top of them.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance import POLICIES, TOKENS, micro_partition, partition
from nestrec.data.batch_order import contiguous, epoch_order
from nestrec.data.dataset import Dataset, DatasetRows
from nestrec.data.synthetic.synthetic_logs import generate, preset
from nestrec.data.synthetic.synthetic_logs import lengths as draw_lengths
from nestrec.pipeline.key_clustering import Clustering, SampleKeys, cluster

Row = dict[str, Any]
CLUSTERING: Clustering = "refined"
MOST_EVENTS = 4_000_000
"""Events to make up at the most."""


def unique_key_rows(
    lengths: str, ranks: int, batch: int, *, rounds: int = 10, micro_batches: int = 4, seed: int = 0
) -> list[Row]:
    """A row for each policy, means over `rounds` global batches of a preset or a prepared dataset.

    Of large batches fewer are made up, and none where one alone would hold more than MOST_EVENTS.
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
    """The rows of a bench, those of the same setting and policy by tokens, without noise, with their unique keys."""
    by_place = {(row["lengths"], row["ranks"], row["policy"]): row for row in found}
    merged = []
    for row in rows:
        keys = by_place.get((row["lengths"], row["ranks"], row["policy"]))
        is_plain = row.get("cost") == "tokens" and row["noise"] == "none"
        merged.append({**row, **{k: v for k, v in keys.items() if k not in row}} if keys and is_plain else row)
    return merged


def _counts(rows: DatasetRows, policy: str, ranks: int, micro_batches: int) -> tuple[int, ...]:
    """Unique keys: of the batch, summed over ranks, over micro-batches in order, of equal cost, clustered by key."""
    tokens = np.diff(rows.lists["item_ids"][1])
    groups = partition(policy, TOKENS.of(tokens), ranks, lengths=tokens)
    in_order = [group[part] for group in groups for part in contiguous(group.size, micro_batches)]
    equal = [group[part] for group in groups for part in micro_partition(TOKENS.of(tokens[group]), micro_batches)]
    clustered = [group[part] for group in groups for part in _clustered(rows, group, micro_batches)]
    whole = [np.arange(rows.num_rows)]
    return tuple(_unique(rows, parts) for parts in (whole, groups, in_order, equal, clustered))


def _clustered(rows: DatasetRows, group: NDArray[np.int64], micro_batches: int) -> list[NDArray[np.int64]]:
    """Micro-batches of a rank by the clustering that training uses, near equal in cost too."""
    values, offsets = rows.take(group).lists["item_ids"]
    keys = SampleKeys(values.astype(np.int64), offsets)
    return cluster(CLUSTERING, keys, TOKENS.of(np.diff(offsets)), micro_batches)


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
