"""Manages the generations (snapshots) of a dataset on disk: commit, restore, and removal of unused files.

    card.json             the card of the current generation
    cards/000003.json     the card of an earlier generation
    layers/000004/        the layer that generation 4 added
    layers/000002-000004/ the merged layer of several generations

New files are written next to those in use, and the card is replaced atomically as the last step. A process that is
killed at any point leaves the previous generation in effect; the next append removes its leftover files.
"""

import contextlib
import dataclasses
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nestrec.base.config import dumps
from nestrec.base.errors import DataError
from nestrec.base.failpoints import fail_point
from nestrec.base.files import check_folder, fsync_path, remove_partials, write_atomic
from nestrec.data.dataset_card import (
    CARD_FILE,
    PENDING_PREFIX,
    DataFile,
    DatasetCard,
    Feature,
    Generation,
    LayerEntry,
    generation_card_path,
)

RETAINED_GENERATIONS = 8
"""Number of generations whose files are retained, because runs may still read them, and users may restore them."""


class DatasetLockedError(DataError):
    """Another process is changing the dataset."""


@contextlib.contextmanager
def locked_dataset(folder: Path) -> Iterator[DatasetCard]:
    """Lock a dataset for changes, remove the leftover files of a killed append, and yield its card.

    Raises:
        DatasetLockedError: Another process holds the lock.
    """
    card = DatasetCard.load(folder)
    check_folder(folder, "dataset")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_unused(folder, card)
        yield DatasetCard.load(folder)
    except BlockingIOError:
        remedy = "wait until the other process has finished"
        raise DatasetLockedError(
            "another process is changing this dataset", option="dataset", value=str(folder), remedy=remedy
        ) from None
    finally:
        os.close(descriptor)


def commit(folder: Path, before: DatasetCard, after: DatasetCard) -> DatasetCard:
    """Commit a new generation: replace the card atomically. All files of the generation must be on disk.

    Args:
        folder: Folder of the dataset.
        before: Card of the current generation; it is retained for `restore`.
        after: Card of the new generation.

    Returns:
        The new card.
    """
    available = folder / generation_card_path(before.generation)
    if not available.exists():
        available.parent.mkdir(exist_ok=True)
        write_atomic(available, dumps(before) + "\n")
    fail_point("data.append.before_card")
    write_atomic(folder / CARD_FILE, dumps(after) + "\n")
    fail_point("data.append.after_card")
    remove_unused(folder, after)
    return after


def restore(folder: Path, generation: int) -> DatasetCard:
    """Make an earlier generation the current one again (rollback); the next append removes later generations.

    Raises:
        DataError: The files of the generation are no longer retained.
    """
    with locked_dataset(folder) as card:
        if card.generation == generation:
            return card
        available = [number for number in range(card.generation) if _is_retained(folder, number)]
        if generation not in available:
            remedy = f"choose one of {', '.join(map(str, [*available, card.generation]))}"
            raise DataError("this generation is not available", option="generation", value=generation, remedy=remedy)
        earlier = DatasetCard.load(folder, generation)
        write_atomic(folder / CARD_FILE, dumps(earlier) + "\n")
        return earlier


def _is_retained(folder: Path, generation: int) -> bool:
    """Return whether an earlier generation still has all of its files; cards are retained longer than files."""
    if not (folder / generation_card_path(generation)).exists():
        return False
    return all((folder / file.path).exists() for file in DatasetCard.load(folder, generation).files)


def install_layer(folder: Path, partial: Path, name: str) -> None:
    """Move the files of a layer from their temporary folder to their final path, after flushing them to disk."""
    for path in sorted(partial.rglob("*")):
        if path.is_file():
            fsync_path(path)
    for path in [*sorted(p for p in partial.rglob("*") if p.is_dir()), partial]:
        fsync_path(path)
    target = folder / "layers" / name
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    fsync_path(target.parent)


def partial_folder(folder: Path, name: str) -> Path:
    """Create and return an empty temporary folder for a new layer."""
    path = folder / "layers" / f".{name}.partial"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def layer_files(files: list[DataFile], layer: LayerEntry) -> list[DataFile]:
    """Return the entries of a layer's files with paths relative to the dataset instead of the layer."""
    return [dataclasses.replace(file, path=layer.folder + file.path) for file in files]


def pending_stream_rows(folder: Path, card: DatasetCard, partial: Path) -> list[DataFile]:
    """Copy the pending rows of a stream, which wait for their time window, from the newest layer into the next one.

    Args:
        folder: Folder of the dataset.
        card: Card of the current generation.
        partial: Temporary folder of the next layer.

    Returns:
        The entries of the copied files.
    """
    layer = card.all_layers[-1]
    files = []
    for file in card.files_of(layer):
        name = file.path.removeprefix(layer.folder)
        if name.startswith(PENDING_PREFIX):
            shutil.copyfile(folder / file.path, partial / name)
            files.append(dataclasses.replace(file, path=name))
    return files


def first_generation(card: DatasetCard, last_ms: int) -> tuple[Generation, ...]:
    """Return the generations of a card, or the prepared generation 0 if nothing was appended yet.

    Args:
        card: Card of the dataset.
        last_ms: Time of the last event in milliseconds since 1970 UTC; used only for generation 0.
    """
    counts = card.counts
    prepared = Generation(
        number=0,
        digest=card.digest_of_files,
        events=counts.events,
        users=counts.users,
        items=counts.items,
        last_ms=last_ms,
        inputs=card.inputs,
    )
    return card.generations or (prepared,)


def append_generation(generations: tuple[Generation, ...], new: Generation) -> tuple[Generation, ...]:
    """Return the generations with a new one, which alone contains the stream offset.

    Offsets list all files that were read, so one per generation would dominate the size of the card. Those of earlier
    generations are in their own cards.
    """
    return (*(dataclasses.replace(generation, stream={}) for generation in generations), new)


def remove_unused(folder: Path, card: DatasetCard) -> None:
    """Delete files that no retained generation uses, and cards of generations that are not before the current one."""
    numbers = [g.number for g in card.generations][-RETAINED_GENERATIONS:]
    cards = [card, *(DatasetCard.load(folder, n) for n in numbers if (folder / generation_card_path(n)).exists())]
    named = {file.path for each in cards for file in each.files}
    layers = folder / "layers"
    for path in layers.iterdir() if layers.exists() else ():
        if not any(name.startswith(f"layers/{path.name}/") for name in named):
            shutil.rmtree(path, ignore_errors=True)
    for path in (folder / "cards").iterdir() if (folder / "cards").exists() else ():
        if path.stem.isdigit() and int(path.stem) >= max(1, card.generation):
            path.unlink()  # of the current generation, or of one that was rolled back
    remove_partials(folder)
    remove_partials(folder / "cards")
    (folder / f".{CARD_FILE}.partial").unlink(missing_ok=True)  # temporary name used by earlier versions


def unknown_values(feature: Feature, kind: pa.DataType, size: int) -> pa.Array:
    """Return default values for a feature without known values: 0 for a category, NaN for a number, empty list or text.

    Args:
        feature: The feature.
        kind: Arrow type of the values.
        size: Number of values.
    """
    if feature.is_list:
        offsets = pa.array(np.zeros(size + 1, np.int32))
        return pa.ListArray.from_arrays(offsets, pa.array([], kind.value_type), type=kind)
    value: Any = {"category": 0, "number": float("nan"), "text": ""}[feature.kind]
    return pa.array([value] * size, kind)
