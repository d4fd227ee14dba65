"""Reads the Criteo display ads dataset: tab-separated label, 13 integers and 26 categories per row, in file order."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nestrec.base.config import config, to_plain
from nestrec.base.config_values import Fraction
from nestrec.base.errors import DataError, require
from nestrec.base.files import replaced_folder
from nestrec.data import dataset_schema
from nestrec.data.dataset_card import CARD_FILE, Counts, DataFile, DatasetCard
from nestrec.data.formats.format_spec import FormatSpec
from nestrec.data.prepare.dataset_writer import UserBlock, UsersWriter
from nestrec.data.prepare.list_cells import category_keys, row_signatures
from nestrec.data.prepare.log_source import delimited_files, name_without_gz, require_input
from nestrec.data.prepare.parse import BAD, GOOD, parse_integers, parse_numbers
from nestrec.data.prepare.prepare_options import Progress
from nestrec.data.prepare.raw_rows import BadRow, DelimitedFormat, Quarantine, RawBatch
from nestrec.data.prepare.spill_files import DuplicateCounter

NUM_DENSE, NUM_CATEGORIES = 13, 26
DENSE_NAMES = tuple(f"I{i}" for i in range(1, NUM_DENSE + 1))
CATEGORY_NAMES = tuple(f"C{i}" for i in range(1, NUM_CATEGORIES + 1))
HOW = DelimitedFormat(separator="\t", names=("label", *DENSE_NAMES, *CATEGORY_NAMES), has_quotes=False)
HASH_KEY = 0x43726974656F
"""Hash key of the first category column; the following columns use the following numbers."""


@config
class CriteoOptions:
    """Options for the Criteo dataset."""

    duplicates: Literal["default", "keep"] = "default"
    """Handling of exact duplicate rows: they are always counted and kept, because equal ad impressions are valid."""
    max_bad_fraction: Fraction = 0.01
    """Maximum fraction of bad rows in the input; more are an error. 1 allows any number."""
    force: bool = False
    """Whether an existing dataset in the output folder is replaced; otherwise it is an error."""


def _prepare(input: str, output: Path, options: CriteoOptions, progress: Progress) -> DatasetCard:
    with replaced_folder(output, marker=CARD_FILE, force=options.force) as folder:
        return write_criteo(folder, Path(input), options, progress)


def write_criteo(folder: Path, path: Path, options: CriteoOptions, progress: Progress) -> DatasetCard:
    """Write a dataset of labeled rows for click-through rate (CTR) models; exact duplicates are counted and kept.

    Args:
        folder: Existing empty folder.
        path: The input file.
        options: Options of the format.
        progress: Callback for progress.

    Returns:
        The card of the dataset.

    Raises:
        DataError: The file has no usable rows or too many bad rows.
    """
    sizes = {dataset_schema.DENSE: NUM_DENSE, dataset_schema.CATEGORIES: NUM_CATEGORIES}
    writer = UsersWriter(folder, dataset_schema.row_fields(), sizes)
    quarantine = Quarantine(folder)
    duplicates = DuplicateCounter(folder)
    num_read = num_rows = 0
    for batch, done in delimited_files([require_input(path)], HOW)():
        block, bad, signatures = _parse(batch)
        quarantine.add(batch.file, [*batch.bad, *bad])
        writer.append(block)
        duplicates.add(signatures)
        num_read += batch.num_rows + len(batch.bad)
        num_rows += block.num_rows
        progress("read", done)
    quarantine.check(num_read, options.max_bad_fraction)
    require(num_rows, "no usable rows", option="input", value=str(path), remedy="check the format", error=DataError)
    files = [*writer.close(), *quarantine.files()]
    counts = Counts(
        users=num_rows,
        items=0,
        events=num_rows,
        rows_read=num_read,
        duplicates_kept=duplicates.finish(),
        quarantined=dict(sorted(quarantine.reasons.items())),
    )
    return _finish(folder, path, counts, files, options)


def _finish(folder: Path, path: Path, counts: Counts, files: list[DataFile], options: CriteoOptions) -> DatasetCard:
    card = DatasetCard(
        kind="rows",
        name=name_without_gz(path),
        source_format="criteo",
        counts=counts,
        files=tuple(files),
        options=to_plain(options),
    )
    card.save(folder)
    return card


def _parse(batch: RawBatch) -> tuple[UserBlock, list[BadRow], NDArray[np.uint64]]:
    labels, states = parse_integers(batch.columns["label"])
    is_labeled = (states == GOOD) & ((labels == 0) | (labels == 1))
    dense = np.empty((batch.num_rows, NUM_DENSE), dtype=np.float32)
    is_number = np.ones(batch.num_rows, dtype=np.bool_)
    for i, name in enumerate(DENSE_NAMES):
        values, states = parse_numbers(batch.columns[name])
        dense[:, i] = values
        is_number &= states != BAD
    categories = np.stack([category_keys(batch.columns[n], HASH_KEY + i) for i, n in enumerate(CATEGORY_NAMES)], axis=1)
    good = is_labeled & is_number
    reasons = np.where(is_labeled, "not a number", "label is not 0 or 1")
    bad = [BadRow(int(batch.lines[i]), str(reasons[i]), batch.row_text(int(i))) for i in np.flatnonzero(~good)]
    lists: dict[str, NDArray[Any]] = {
        dataset_schema.DENSE: dense[good].ravel(),
        dataset_schema.CATEGORIES: categories[good].ravel(),
    }
    scalars = {dataset_schema.LABEL: pa.array(labels[good].astype(np.int8))}
    signatures = row_signatures(list(batch.columns.values()), batch.num_rows)[good]
    return UserBlock(np.ones(int(good.sum()), dtype=np.int32), scalars, lists), bad, signatures


FORMAT = FormatSpec("Criteo display ads: label, 13 numbers and 26 categories, tab separated.", CriteoOptions, _prepare)
