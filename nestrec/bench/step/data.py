"""A small dataset whose batches have given lengths, for benchmarks that go through the real tasks."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nestrec.data import schema
from nestrec.data.batches import Assembler, Batch
from nestrec.data.card import Card, Counts
from nestrec.data.order import Position
from nestrec.data.prepare.finish import finish_sequences, write_items
from nestrec.data.prepare.folder import whole_folder
from nestrec.data.prepare.writer import UserBlock, UsersWriter

START_MS = 1_640_995_200_000
MEAN_GAP_MS = 60_000
HELD_OUT = 3
"""events of a user beyond its training tokens: the last target, and those of validation and test"""
ACTION_BITS = {name: schema.KUAIRAND_BITS[name] for name in ("click", "like", "long_view")}


def write_step_data(folder: Path, lengths: NDArray[np.int64], *, num_batches: int, num_items: int, zipf: float) -> None:
    """Users whose training sequences have `lengths`, as often as there are batches; items by a power law."""
    draw = np.random.default_rng(0)
    events = np.tile(lengths + HELD_OUT, num_batches)
    total = int(events.sum())
    # A power law by inversion; popular items are spread over the catalogue by a stride.
    rank = np.minimum(num_items * draw.random(total) ** (1.0 / (1.0 - zipf)), num_items - 1).astype(np.int64)
    items = 1 + (rank * 2_654_435_761) % num_items
    times = START_MS + np.cumsum(draw.exponential(MEAN_GAP_MS, total)).astype(np.int64)
    ids, counts = np.arange(len(events)), np.bincount(items, minlength=num_items + 1)
    scalars = {
        schema.USER_ID: pa.array(ids),
        schema.USER_KEY: pa.array(ids).cast(pa.string()),
        schema.LENGTH: pa.array(events.astype(np.int32)),
    }
    lists = {schema.ITEM_IDS: items, schema.TIMESTAMPS_MS: times, schema.ACTIONS: draw.integers(0, 8, total, np.int32)}
    fields = schema.sequence_fields(has_timestamps=True, has_actions=True, features={})
    with whole_folder(folder, force=False) as made:
        writer = UsersWriter(made, fields)
        writer.append(UserBlock(events.astype(np.int32), scalars, lists))
        numbers = np.arange(1, num_items + 1)
        table = pa.table(
            {
                "item_id": pa.array(numbers),
                "item_key": pa.array(numbers).cast(pa.string()),
                "count": pa.array(counts[1:]),
            }
        )
        files = [*writer.close(), write_items(made, iter([table]))]
        card = Card(
            kind="sequences",
            name="step",
            source_format="synthetic",
            has_timestamps=True,
            action_bits=ACTION_BITS,
            counts=Counts(users=len(events), items=num_items, events=total, rows_read=total),
        )
        finish_sequences(made, card, events.astype(np.int32), counts[1:], files)


def fixed_batch(assembler: Assembler, number: int, batch_samples: int) -> Batch:
    """The samples `number * batch_samples` and on, as one micro-batch."""
    samples = np.arange(number * batch_samples, (number + 1) * batch_samples)
    part = assembler.assemble(samples, assembler.read(samples), number)
    return Batch(
        position=Position(number, 0),
        weight=assembler.weight(samples, number),
        global_samples=samples,
        micro_batches=(part,),
        tokens=assembler.tokens_in(samples, number),
    )
