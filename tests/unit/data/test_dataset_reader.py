"""Rows are read by global index, in any order and from any thread; corrupt files are detected at open."""

import itertools
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestrec.base.errors import CorruptFileError, DataError, UserError
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.synthetic import synthetic_logs as synthetic

SHAPE = synthetic.preset("tiny", num_users=2500, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reader") / "dataset"
    synthetic.generate(SHAPE, path)
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    for file in folder.rglob("*"):
        if file.is_file():
            target = tmp_path / "copy" / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    return tmp_path / "copy"


def events_of(user: int) -> list[int]:
    return synthetic.draw_events(SHAPE, user, user + 1).item_ids.tolist()


@given(indices=st.lists(st.integers(0, 2499), max_size=30))
def test_dataset_rows_follow_requested_order_with_repeats(folder: Path, indices: list[int]) -> None:
    rows = Dataset.open(folder, cache_bytes=1).rows(np.array(indices, dtype=np.int64))
    items, offsets = rows.lists["item_ids"]
    assert rows.scalars["user_id"].tolist() == indices
    assert [items[a:b].tolist() for a, b in itertools.pairwise(offsets)] == [events_of(u) for u in indices]
    assert rows.lists["actions"][0].size == items.size


def test_dataset_lengths_and_row_groups_need_no_row_reads(folder: Path) -> None:
    dataset = Dataset.open(folder)
    assert dataset.lengths.dtype == np.int32
    assert np.array_equal(dataset.lengths, synthetic.draw_lengths(SHAPE, 0, 2500))
    assert dataset.row_group_bounds.tolist() == [0, 1024, 2048, 2500]
    assert dataset.row_group_of(np.array([0, 1023, 1024, 2499])).tolist() == [0, 0, 1, 2]
    assert (dataset.num_samples, dataset.num_items) == (2500, SHAPE.num_items)


def test_dataset_columns_are_selected_and_typos_suggested(folder: Path) -> None:
    rows = Dataset.open(folder, columns=["item_ids", "user_key"]).rows(np.array([7]))
    assert list(rows.lists) == ["item_ids"]
    assert rows.scalars["user_key"].tolist() == ["7"]
    with pytest.raises(DataError, match=r"(?i)did you mean 'item_ids'"):
        Dataset.open(folder, columns=["item_id"])


def test_dataset_rows_reject_index_out_of_range(folder: Path) -> None:
    for wrong in (-1, 2500):
        with pytest.raises(IndexError):
            Dataset.open(folder).rows(np.array([wrong]))


def test_dataset_cache_respects_byte_limit(folder: Path) -> None:
    dataset = Dataset.open(folder)
    for _ in range(3):
        dataset.rows(np.arange(2500))
    assert dataset._cache.num_loads == 3
    small = Dataset.open(folder, cache_bytes=dataset._cache.num_bytes // 2)
    for start in (0, 1024, 2048, 0):
        small.rows(np.array([start]))
        assert small._cache.num_bytes <= dataset._cache.num_bytes // 2
    assert small._cache.num_loads == 4


def test_dataset_is_shared_between_threads(folder: Path) -> None:
    dataset = Dataset.open(folder, cache_bytes=1)
    failures: list[BaseException] = []

    def read(seed: int) -> None:
        try:
            for indices in np.random.default_rng(seed).integers(0, 2500, (20, 16)):
                rows = dataset.rows(indices)
                assert rows.scalars["user_id"].tolist() == indices.tolist()
                assert np.array_equal(np.diff(rows.lists["item_ids"][1]), dataset.lengths[indices])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_dataset_folder_without_card_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"card.json is missing"):
        Dataset.open(tmp_path)


@pytest.mark.parametrize("name", ["users/part-00000.parquet", "items.parquet"])
def test_dataset_missing_or_truncated_file_fails_at_open(copy: Path, name: str) -> None:
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[:-10])
    with pytest.raises(CorruptFileError, match=r"bytes, but the card lists"):
        Dataset.open(copy)
    (copy / name).unlink()
    with pytest.raises(CorruptFileError, match="missing"):
        Dataset.open(copy)


def test_dataset_verify_detects_each_flipped_byte(copy: Path) -> None:
    generator = np.random.default_rng(1)
    path = copy / "users/part-00000.parquet"
    content = path.read_bytes()
    for position in generator.integers(0, len(content), 20):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(CorruptFileError):
            Dataset.open(copy).verify()
    path.write_bytes(content)
    Dataset.open(copy).verify()


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"users": 2500', '"users": 2499'),
        lambda text: text.replace('"kind"', '"kinds"', 1),
    ],
)
def test_dataset_card_corrupt_is_an_error(copy: Path, edit) -> None:  # type: ignore[no-untyped-def]
    card = copy / "card.json"
    card.write_text(edit(card.read_text()))
    with pytest.raises(CorruptFileError):
        Dataset.open(copy)


def test_dataset_card_of_another_version_is_rejected(copy: Path) -> None:
    plain = json.loads((copy / "card.json").read_text())
    (copy / "card.json").write_text(json.dumps({**plain, "format_version": 99}))
    with pytest.raises(UserError, match="version 99"):
        Dataset.open(copy)


def test_dataset_card_round_trips_through_its_file(folder: Path) -> None:
    card = DatasetCard.load(folder)
    assert DatasetCard.load(folder) == card
    assert sum(card.length_histogram.counts) == card.counts.users
    assert sum(card.popularity_histogram.counts) == np.count_nonzero(Dataset.open(folder).items()["count"].to_numpy())
