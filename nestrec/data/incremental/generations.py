"""Generations of a dataset on the disk: files are written beside those in use, and the card is replaced at the end.

    card.json             the generation in force
    cards/000003.json     the card of an earlier generation
    layers/000004/        what generation 4 has added; layers/000002-000004/ what several have, put together

A kill at any moment leaves the generation that was in force; what it left behind is removed by the next append.

Values of features of which nothing is known.
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
    PENDING,
    DataFile,
    DatasetCard,
    Feature,
    Generation,
    LayerEntry,
    card_of_generation,
)

KEPT_GENERATIONS = 8
"""Files of so many generations stay: runs may still read them, and go back to them."""


class DatasetLockedError(DataError):
    """Another process changes a dataset now."""


@contextlib.contextmanager
def growing(folder: Path) -> Iterator[DatasetCard]:
    """The card of a dataset that nobody else changes while the block lasts; leftovers of a killed append are gone."""
    card = DatasetCard.load(folder)
    check_folder(folder, "dataset")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_unused(folder, card)
        yield DatasetCard.load(folder)
    except BlockingIOError:
        remedy = "wait for the other process to end"
        raise DatasetLockedError(
            "is being changed by another process", option="dataset", value=str(folder), remedy=remedy
        ) from None
    finally:
        os.close(descriptor)


def commit(folder: Path, before: DatasetCard, after: DatasetCard) -> DatasetCard:
    """Make a generation the one in force: its files are on the disk, and its card takes the place of the old one."""
    kept = folder / card_of_generation(before.generation)
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        write_atomic(kept, dumps(before) + "\n")
    fail_point("data.append.before_card")
    write_atomic(folder / CARD_FILE, dumps(after) + "\n")
    fail_point("data.append.after_card")
    remove_unused(folder, after)
    return after


def restore(folder: Path, generation: int) -> DatasetCard:
    """Put an earlier generation in force again; what came after it is removed by the next append."""
    with growing(folder) as card:
        if card.generation == generation:
            return card
        kept = [number for number in range(card.generation) if _is_kept(folder, number)]
        if generation not in kept:
            remedy = f"take one of {', '.join(map(str, [*kept, card.generation]))}"
            raise DataError("is no generation that is kept", option="generation", value=generation, remedy=remedy)
        earlier = DatasetCard.load(folder, generation)
        write_atomic(folder / CARD_FILE, dumps(earlier) + "\n")
        return earlier


def _is_kept(folder: Path, generation: int) -> bool:
    """An earlier one, with all of its files: cards outlive those."""
    if not (folder / card_of_generation(generation)).exists():
        return False
    return all((folder / file.path).exists() for file in DatasetCard.load(folder, generation).files)


def place_layer(folder: Path, partial: Path, name: str) -> None:
    """Move the files of a layer, written in a folder beside, to where the card will name them."""
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
    """An empty folder in which a layer is written."""
    path = folder / "layers" / f".{name}.partial"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def moved(files: list[DataFile], layer: LayerEntry) -> list[DataFile]:
    """Files described inside a layer's folder, as the card names them."""
    return [dataclasses.replace(file, path=layer.folder + file.path) for file in files]


def carried_on(folder: Path, card: DatasetCard, partial: Path) -> list[DataFile]:
    """Rows of a stream that wait for their window: they lie in the newest layer, and go into the one after it."""
    layer = card.all_layers[-1]
    files = []
    for file in card.files_of(layer):
        name = file.path.removeprefix(layer.folder)
        if name.startswith(PENDING):
            shutil.copyfile(folder / file.path, partial / name)
            files.append(dataclasses.replace(file, path=name))
    return files


def first_generation(card: DatasetCard, last_ms: int) -> tuple[Generation, ...]:
    """The generations of a card; one where nothing was appended yet."""
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


def followed_by(generations: tuple[Generation, ...], new: Generation) -> tuple[Generation, ...]:
    """With a new one, which alone says how far a stream was read: the names of all files that were, once for each
    generation, would soon outweigh all else, and earlier ones have theirs on their own cards."""
    return (*(dataclasses.replace(generation, stream={}) for generation in generations), new)


def remove_unused(folder: Path, card: DatasetCard) -> None:
    """Delete what no generation of the last few names; a generation after the one in force was never in force."""
    numbers = [g.number for g in card.generations][-KEPT_GENERATIONS:]
    cards = [card, *(DatasetCard.load(folder, n) for n in numbers if (folder / card_of_generation(n)).exists())]
    named = {file.path for each in cards for file in each.files}
    layers = folder / "layers"
    for path in layers.iterdir() if layers.exists() else ():
        if not any(name.startswith(f"layers/{path.name}/") for name in named):
            shutil.rmtree(path, ignore_errors=True)
    for path in (folder / "cards").iterdir() if (folder / "cards").exists() else ():
        if path.stem.isdigit() and int(path.stem) >= max(1, card.generation):
            path.unlink()  # of the generation in force, or of one that was gone back from
    remove_partials(folder)
    remove_partials(folder / "cards")
    (folder / f".{CARD_FILE}.partial").unlink(missing_ok=True)  # the temporary name that earlier versions used


def unknown_values(feature: Feature, kind: pa.DataType, number: int) -> pa.Array:
    """So many of them, of an Arrow type: 0 for a category, NaN for a number, an empty list or text."""
    if feature.is_list:
        offsets = pa.array(np.zeros(number + 1, np.int32))
        return pa.ListArray.from_arrays(offsets, pa.array([], kind.value_type), type=kind)
    value: Any = {"category": 0, "number": float("nan"), "text": ""}[feature.kind]
    return pa.array([value] * number, kind)
