"""Datasets larger than memory: tasks read row groups, shuffles stay within blocks, unused columns are not read."""

from pathlib import Path

import numpy as np
import pytest

from nestrec.data import dataset as module
from nestrec.data.batch_loader import BatchConfig, BatchLoader
from nestrec.data.batch_order import BatchPosition
from nestrec.data.dataset import Dataset
from nestrec.data.samples.split import item_counts, split_leave_one_out, sum_target_weights
from nestrec.report.run_records import RunRecords
from nestrec.report.speed_sections import speed
from nestrec.tasks.task_registry import make_task
from support.tiny_runs import config_of, make_datasets


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scale")
    make_datasets(folder, num_topics=3)
    return folder


def test_select_columns_keeps_rows_and_reports_decoded_bytes(data):
    dataset = Dataset.open(data / "sequences")
    narrow = dataset.select_columns(["item_ids", "actions"])
    indices = np.array([7, 3, 3])
    rows = narrow.rows(indices)
    expected = dataset.rows(indices)
    assert set(rows.lists) == {"item_ids", "actions"}
    assert not rows.scalars
    for name, (values, offsets) in rows.lists.items():
        assert np.array_equal(values, expected.lists[name][0])
        assert np.array_equal(offsets, expected.lists[name][1])
    everything = narrow.rows(np.arange(dataset.num_samples)).lists
    assert narrow.decoded_bytes == sum(values.nbytes for values, _ in everything.values())
    assert narrow.decoded_bytes < dataset.decoded_bytes


def test_row_group_counts_sum_to_dataset_counts(data):
    dataset = Dataset.open(data / "sequences")
    split = split_leave_one_out(dataset.lengths)
    lists = dataset.rows(np.arange(dataset.num_samples)).lists
    items, offsets = lists["item_ids"]
    trained = [slice(start, start + end) for start, end in zip(offsets[:-1], split.train_end, strict=True)]
    counts = np.bincount(np.concatenate([items[part] for part in trained]), minlength=dataset.num_items + 1)
    assert np.array_equal(item_counts(dataset, split.train_end), counts)
    masks = lists["actions"][0]
    expected = [masks[max(part.start + 1, part.stop - 4) : part.stop].astype(float).sum() for part in trained]
    assert sum_target_weights(dataset, split.train_end, 4, lambda m: m.astype(float)).tolist() == expected


@pytest.mark.parametrize("family", ["hstu", "sasrec", "ranking", "rows"])
def test_task_training_reads_only_rows_of_the_batch(data, family, monkeypatch):
    read_sizes = []
    rows = Dataset.rows
    monkeypatch.setattr(Dataset, "rows", lambda self, indices: read_sizes.append(len(indices)) or rows(self, indices))
    cfg = config_of(family, data, {"task.negatives.sampler": "popularity"} if family == "hstu" else {})
    dataset = Dataset.open(cfg.data.folder)
    task = make_task(cfg.task, dataset, seed=1, dtype="float32")
    BatchLoader(task.collator, BatchConfig(batch_size=8), seed=1).load_one(BatchPosition())
    assert max(read_sizes) <= 8 < dataset.num_samples


def test_shuffle_of_large_datasets_reads_contiguous_blocks(data, monkeypatch):
    cfg = config_of("hstu", data)

    def order_of() -> np.ndarray:
        task = make_task(cfg.task, Dataset.open(cfg.data.folder), seed=1, dtype="float32")
        batches = BatchLoader(task.collator, BatchConfig(batch_size=5), seed=1)
        return np.concatenate(
            [batches.order.samples(BatchPosition(0, s)) for s in range(batches.order.steps_in_epoch(0))]
        )

    full_order = order_of()
    assert np.ptp(full_order[:10]) > 10, "all samples are shuffled if they fit"
    monkeypatch.setattr(module, "FULL_SHUFFLE_BYTES", 100)
    narrow = Dataset.open(cfg.data.folder).select_columns(["item_ids"])
    monkeypatch.setattr(module, "SHUFFLE_BLOCK_BYTES", narrow.decoded_bytes // 4)
    blocks = order_of()
    assert sorted(blocks) == sorted(full_order)
    assert np.ptp(blocks[:5]) == 4, "with items and times, a block is an eighth of the samples"


@pytest.mark.parametrize(("readable", "wait_ms", "text"), [(500, 0, "fast enough"), (120, 50, "too slow by 40%")])
def test_report_shows_whether_reading_keeps_up(readable, wait_ms, text):
    step = {"samples_per_s": 100.0, "step_ms": 100.0, "readable_per_s": readable, "parts": {"data.wait": wait_ms}}
    lists = {name: [] for name in ("evaluations", "events", "windows", "spans", "problems")}
    mappings = {name: {} for name in ("config", "versions", "card", "parameters")}
    run = RunRecords(folder=Path(), steps=[{"step": n, **step} for n in (10, 20)], **lists, **mappings)
    assert f"The data loader is {text}" in str(speed(run))
