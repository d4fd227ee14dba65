"""Synthetic logs: users, items, lengths and popularity shaped like public datasets, as a pure function of a seed.

Users move between a few liked topics and along cycles of items (see `synthetic_walk`), so the next item depends on
recent ones. Every user is generated from (seed, user number) alone.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numba import njit
from numpy.typing import NDArray

from nestrec.base.config import config, to_plain
from nestrec.base.errors import UserError, did_you_mean
from nestrec.base.files import replaced_folder
from nestrec.base.random import fold, fold_array
from nestrec.data import dataset_schema
from nestrec.data.dataset_card import CARD_FILE, Counts, DatasetCard, Feature
from nestrec.data.flat_arrays import add_counts, offsets_of_lengths
from nestrec.data.prepare.dataset_writer import UserBlock, UsersWriter, finish_sequences, write_items
from nestrec.data.prepare.prepare_options import Progress, silent
from nestrec.data.synthetic.synthetic_walk import permute, walk

USERS_PER_BLOCK = 4096
EVENTS_PER_BLOCK = 1 << 21
START_MS = 1_640_995_200_000
"""2022-01-01 UTC in Unix milliseconds."""
SPAN_MS = 30 * 86_400_000
ACTION_BITS = {name: dataset_schema.KUAIRAND_BITS[name] for name in ("click", "like", "long_view")}


@config
class SyntheticConfig:
    """Shape of a synthetic dataset."""

    name: str = "synthetic"
    """Name on the dataset card."""
    num_users: int
    """Number of users."""
    num_items: int
    """Size of the catalog; some items may have no events."""
    ln_mean: float
    """Mu of the log-normal distribution of sequence lengths."""
    ln_sd: float
    """Sigma of the log-normal distribution of sequence lengths."""
    min_length: int = 5
    """Minimum sequence length in events; shorter sequences are extended."""
    max_length: int
    """Maximum sequence length in events; longer sequences are truncated."""
    zipf_s: float = 0.7
    """Exponent of the Zipf-Mandelbrot distribution of popularity; must not be 1."""
    zipf_q: float = 0.0
    """Offset of the Zipf-Mandelbrot distribution; larger values flatten the head."""
    num_topics: int = 16
    """Number of latent topics; rank r belongs to topic r mod num_topics."""
    follow_chance: float = 0.75
    """Probability that the next item follows one of the two cycles through the current one."""
    dialect_chance: float = 0.85
    """Probability that it follows the cycle that the user prefers."""
    stay_chance: float = 0.6
    """Probability of staying in the topic if no cycle is followed."""
    num_interests: int = 1
    """Number of interests between which a user alternates; each continues from its last item."""
    switch_chance: float = 0.6
    """Probability of switching to the next interest, if there are several."""
    allows_repeats: bool = False
    """Whether an item can occur more than once in a user's sequence."""
    seed: int = 0
    """Seed of all random draws."""


PRESETS = {
    "tiny": SyntheticConfig(
        name="tiny",
        num_users=2000,
        num_items=800,
        ln_mean=3.25,
        ln_sd=0.5,
        max_length=128,
        zipf_s=0.8,
        zipf_q=4.0,
    ),
    "interests": SyntheticConfig(
        name="interests",
        num_users=2000,
        num_items=800,
        ln_mean=3.5,
        ln_sd=0.4,
        max_length=128,
        zipf_s=0.8,
        zipf_q=4.0,
        num_interests=2,
        switch_chance=0.8,
        follow_chance=0.9,
        dialect_chance=1.0,
    ),
    "ml-1m-like": SyntheticConfig(
        name="ml-1m-like",
        num_users=6038,
        num_items=3307,
        ln_mean=4.44,
        ln_sd=0.98,
        min_length=16,
        max_length=1924,
        zipf_s=3.66,
        zipf_q=1372.0,
        follow_chance=0.5,
    ),
    "kuairand-27k-like": SyntheticConfig(
        name="kuairand-27k-like",
        num_users=27_285,
        num_items=32_038_725,
        ln_mean=9.06,
        ln_sd=0.80,
        min_length=100,
        max_length=228_000,
        zipf_s=0.75,
        num_topics=64,
        allows_repeats=True,
    ),
    "turbogr-kuai": SyntheticConfig(
        name="turbogr-kuai",
        num_users=100_000,
        num_items=1_000_000,
        ln_mean=6.0,
        ln_sd=1.5,
        min_length=5,
        max_length=2048,
        zipf_s=0.75,
        num_topics=64,
        allows_repeats=True,
    ),
    "freescale": SyntheticConfig(
        name="freescale",
        num_users=100_000,
        num_items=10_000_000,
        ln_mean=7.5,
        ln_sd=1.2,
        min_length=5,
        max_length=21_000,
        zipf_s=0.75,
        num_topics=64,
        allows_repeats=True,
    ),
}


@dataclass(frozen=True, slots=True)
class EventBlock:
    """Events of consecutive users starting at `first_user`, grouped by user; item ids are dense from 1."""

    first_user: int
    lengths: NDArray[np.int32]
    item_ids: NDArray[np.int64]
    times_ms: NDArray[np.int64]
    actions: NDArray[np.int32]


def preset(name: str, *, num_users: int | None = None, num_items: int | None = None, seed: int = 0) -> SyntheticConfig:
    """Return a preset shape. With another number of users, the catalog is scaled, but not below 1000 items."""
    if name not in PRESETS:
        raise UserError("no such synthetic preset", option="preset", value=name, remedy=did_you_mean(name, PRESETS))
    base = PRESETS[name]
    users = base.num_users if num_users is None else num_users
    scaled_items = max(min(base.num_items, 1000), base.num_items * users // base.num_users)
    return dataclasses.replace(
        base, num_users=users, num_items=scaled_items if num_items is None else num_items, seed=seed
    )


def lengths(shape: str | SyntheticConfig, num_users: int, seed: int = 0) -> NDArray[np.int32]:
    """Return the sequence lengths of users 0 to num_users - 1, equal to those that `generate` uses."""
    base = preset(shape) if isinstance(shape, str) else shape
    return draw_lengths(dataclasses.replace(base, num_users=num_users, seed=seed), 0, num_users)


def draw_lengths(shape: SyntheticConfig, first_user: int, end_user: int) -> NDArray[np.int32]:
    """Draw log-normal sequence lengths of some users, rounded and clipped, by the Box-Muller transform."""
    keys = fold_array(fold(shape.seed, 1), np.arange(first_user, end_user, dtype=np.int64))
    u = (fold_array(keys, np.zeros(keys.size, np.int64)) >> np.uint64(11)) * 2.0**-53
    v = (fold_array(keys, np.ones(keys.size, np.int64)) >> np.uint64(11)) * 2.0**-53
    normal = np.sqrt(-2.0 * np.log1p(-u)) * np.cos(2.0 * np.pi * v)
    drawn = np.rint(np.exp(shape.ln_mean + shape.ln_sd * normal))
    top = shape.max_length if shape.allows_repeats else min(shape.max_length, max(1, shape.num_items // 2))
    clipped: NDArray[np.int32] = np.clip(drawn, min(shape.min_length, top), top).astype(np.int32)
    return clipped


def draw_events(shape: SyntheticConfig, first_user: int, end_user: int) -> EventBlock:
    """Draw the events of some users, each a function of (seed, user) alone."""
    row_lengths = draw_lengths(shape, first_user, end_user)
    offsets = offsets_of_lengths(row_lengths)
    ranks, times_ms = np.empty((2, int(offsets[-1])), dtype=np.int64)
    actions = np.empty(int(offsets[-1]), dtype=np.int32)
    keys = fold_array(fold(shape.seed, 2), np.arange(first_user, end_user, dtype=np.int64))
    catalog_key = _catalog_key(shape)
    last_user_of_rank = np.zeros(0 if shape.allows_repeats else shape.num_items, dtype=np.int32)
    walk(
        keys,
        offsets,
        (shape.num_items, shape.num_topics, catalog_key),
        (shape.num_interests, shape.switch_chance),
        (shape.zipf_s, shape.zipf_q),
        (shape.follow_chance, shape.dialect_chance, shape.stay_chance),
        START_MS,
        SPAN_MS,
        last_user_of_rank,
        ranks,
        times_ms,
        actions,
    )
    return EventBlock(first_user, row_lengths, _item_ids(ranks, shape.num_items, catalog_key), times_ms, actions)


def blocks(shape: SyntheticConfig) -> Iterator[EventBlock]:
    """Yield all users in blocks with bounded numbers of users and events."""
    all_lengths = draw_lengths(shape, 0, shape.num_users)
    offsets = offsets_of_lengths(all_lengths)
    start = 0
    while start < shape.num_users:
        by_events = int(np.searchsorted(offsets, offsets[start] + EVENTS_PER_BLOCK))
        end = min(shape.num_users, start + USERS_PER_BLOCK, max(by_events, start + 1))
        yield draw_events(shape, start, end)
        start = end


def generate(shape: SyntheticConfig, output: Path, *, force: bool = False, progress: Progress = silent) -> DatasetCard:
    """Write a synthetic dataset and return its card.

    Args:
        shape: Shape of the dataset.
        output: Folder to write.
        force: Whether to replace an existing dataset.
        progress: Receives the progress of the generation.
    """
    check_shape(shape)
    fields = dataset_schema.sequence_fields(has_timestamps=True, has_actions=True, features={})
    counts = np.zeros(shape.num_items + 1, dtype=np.int64)
    with replaced_folder(Path(output), marker=CARD_FILE, force=force) as folder:
        writer = UsersWriter(folder, fields)
        for block in blocks(shape):
            writer.append(_user_block(block))
            add_counts(block.item_ids, counts)
            progress("draw users", (block.first_user + block.lengths.size) / shape.num_users)
        files = [*writer.close(), write_items(folder, _item_batches(shape, counts))]
        card = DatasetCard(
            kind="sequences",
            name=shape.name,
            source_format="synthetic",
            counts=Counts(
                users=shape.num_users, items=shape.num_items, events=int(counts.sum()), rows_read=int(counts.sum())
            ),
            has_timestamps=True,
            action_bits=ACTION_BITS,
            item_features=(Feature(name="topic", kind="category", owner="item", vocabulary_size=shape.num_topics + 1),),
            options=to_plain(shape),
        )
        return finish_sequences(folder, card, draw_lengths(shape, 0, shape.num_users), counts[1:], files)


def write_csv(shape: SyntheticConfig, path: Path) -> int:
    """Write the same events as a raw CSV log with a header, and return the number of events.

    Events are sorted by time inside each block. Columns: user, item, time_ms, click, like, long_view.
    """
    check_shape(shape)
    num_events = 0
    names = ["user", "item", "time_ms", *ACTION_BITS]
    types = pa.schema([(name, pa.int64()) for name in names])
    with pyarrow.csv.CSVWriter(path, types) as writer:
        for block in blocks(shape):
            users = np.repeat(np.arange(block.lengths.size) + block.first_user, block.lengths)
            order = np.lexsort((users, block.times_ms))
            bits = [(block.actions[order] & bit != 0).astype(np.int64) for bit in ACTION_BITS.values()]
            columns = [users[order], block.item_ids[order], block.times_ms[order], *bits]
            writer.write_table(pa.Table.from_arrays([pa.array(c) for c in columns], schema=types))
            num_events += users.size
    return num_events


def check_shape(shape: SyntheticConfig) -> None:
    """Raise a `UserError` if a shape cannot be generated."""
    for name in ("num_users", "num_items", "num_topics", "num_interests", "min_length", "max_length"):
        if getattr(shape, name) < 1:
            raise UserError(
                "must be at least 1", option=name, value=getattr(shape, name), remedy="set a positive number"
            )
    if abs(shape.zipf_s - 1.0) < 1e-6:
        raise UserError("must differ from 1", option="zipf_s", value=shape.zipf_s, remedy="set 0.999 or 1.001")
    if shape.num_topics > shape.num_items:
        raise UserError(
            f"must be at least the number of topics, {shape.num_topics}",
            option="num_items",
            value=shape.num_items,
            remedy=f"set {shape.num_topics} or more",
        )


def _user_block(block: EventBlock) -> UserBlock:
    ids = np.arange(block.first_user, block.first_user + block.lengths.size, dtype=np.int64)
    scalars = {
        dataset_schema.USER_ID: pa.array(ids),
        dataset_schema.USER_KEY: pa.array(ids).cast(pa.string()),
        dataset_schema.LENGTH: pa.array(block.lengths),
    }
    lists: dict[str, NDArray[Any]] = {
        dataset_schema.ITEM_IDS: block.item_ids,
        dataset_schema.TIMESTAMPS_MS: block.times_ms,
        dataset_schema.ACTIONS: block.actions,
    }
    return UserBlock(block.lengths, scalars, lists)


def _item_batches(shape: SyntheticConfig, counts: NDArray[np.int64]) -> Iterator[pa.Table]:
    """Yield the items table in batches. Topics are assigned in one pass over the ranks."""
    topics = np.empty(shape.num_items + 1, dtype=np.int64)
    ranks = np.arange(shape.num_items, dtype=np.int64)
    topics[_item_ids(ranks, shape.num_items, _catalog_key(shape))] = ranks % shape.num_topics + 1
    for start in range(1, shape.num_items + 1, 1 << 20):
        ids = np.arange(start, min(start + (1 << 20), shape.num_items + 1), dtype=np.int64)
        yield pa.table(
            {
                "item_id": pa.array(ids),
                "item_key": pa.array(ids).cast(pa.string()),
                "count": pa.array(counts[ids]),
                "item_topic": pa.array(topics[ids]),
            }
        )


def _catalog_key(shape: SyntheticConfig) -> np.uint64:
    return np.uint64(fold(shape.seed, 3))


@njit(cache=True, nogil=True)
def _item_ids(ranks: NDArray[np.int64], num_items: int, key: np.uint64) -> NDArray[np.int64]:
    """Return item ids from 1, in an order that is independent of popularity and topic."""
    ids = np.empty_like(ranks)
    for i in range(ranks.size):
        ids[i] = 1 + permute(ranks[i], num_items, key)
    return ids
