"""The last steps of writing a dataset: the items table, statistics and the card."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nestrec.data.card import Card, DataFile, describe_file
from nestrec.data.prepare.statistics import length_statistics, log_histogram, popularity_statistics


def write_items(folder: Path, batches: Iterable[pa.Table]) -> DataFile:
    """Write `items.parquet` from pieces in order of item id; at least one piece, which may be empty."""
    path = folder / "items.parquet"
    num_rows = 0
    writer: pq.ParquetWriter | None = None
    for batch in batches:
        writer = writer or pq.ParquetWriter(path, batch.schema, compression="zstd")
        writer.write_table(batch)
        num_rows += batch.num_rows
    assert writer is not None
    writer.close()
    return describe_file(folder, path, num_rows)


def finish_sequences(
    folder: Path, card: Card, lengths: NDArray[Any], item_counts: NDArray[np.int64], files: list[DataFile]
) -> Card:
    """Complete the card of a dataset of sequences with statistics and files, and save it."""
    complete = dataclasses.replace(
        card,
        lengths=length_statistics(lengths),
        popularity=popularity_statistics(item_counts),
        length_histogram=log_histogram(lengths),
        popularity_histogram=log_histogram(item_counts),
        files=tuple(files),
    )
    complete.save(folder)
    return complete
