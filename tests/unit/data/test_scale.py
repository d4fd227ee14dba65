"""Datasets larger than memory: tasks read by row groups, shuffles stay in blocks, unread columns stay on disk."""

from pathlib import Path

import numpy as np
import pytest

from nestrec.data import dataset as module
from nestrec.data.batch_loader import BatchConfig, BatchLoader
from nestrec.data.batch_order import BatchPosition
from nestrec.data.dataset import Dataset
from nestrec.data.samples.split import item_counts, leave_one_out, target_weights
from nestrec.report.run_records import RunRecords
from nestrec.report.speed_sections import speed
from nestrec.tasks.task_registry import make_task
from support.tiny_runs import config_of, make_datasets


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scale")
    make_datasets(folder, num_topics=3)
    return folder


def test_fewer_columns_are_the_same_rows_and_take_what_is_said(data):
    dataset = Dataset.open(data / "sequences")
    narrow = dataset.only(["item_ids", "actions"])
    some = np.array([7, 3, 3])
    rows = narrow.rows(some)
    expected = dataset.rows(some)
    assert set(rows.lists) == {"item_ids", "actions"}
    assert not rows.scalars
    for name, (values, offsets) in rows.lists.items():
        assert np.array_equal(values, expected.lists[name][0])
        assert np.array_equal(offsets, expected.lists[name][1])
    everything = narrow.rows(np.arange(dataset.num_samples)).lists
    assert narrow.decoded_bytes == sum(values.nbytes for values, _ in everything.values())
    assert narrow.decoded_bytes < dataset.decoded_bytes


def test_what_is_counted_by_row_groups_is_what_lies_in_all_of_them(data):
    dataset = Dataset.open(data / "sequences")
    split = leave_one_out(dataset.lengths)
    lists = dataset.rows(np.arange(dataset.num_samples)).lists
    items, offsets = lists["item_ids"]
    trained = [slice(start, start + end) for start, end in zip(offsets[:-1], split.train_end, strict=True)]
    counts = np.bincount(np.concatenate([items[part] for part in trained]), minlength=dataset.num_items + 1)
    assert np.array_equal(item_counts(dataset, split.train_end), counts)
    masks = lists["actions"][0]
    expected = [masks[max(part.start + 1, part.stop - 4) : part.stop].astype(float).sum() for part in trained]
    assert target_weights(dataset, split.train_end, 4, lambda m: m.astype(float)).tolist() == expected


@pytest.mark.parametrize("family", ["hstu", "sasrec", "ranking", "rows"])
def test_no_task_asks_for_all_rows_to_train(data, family, monkeypatch):
    asked = []
    rows = Dataset.rows
    monkeypatch.setattr(Dataset, "rows", lambda self, indices: asked.append(len(indices)) or rows(self, indices))
    cfg = config_of(family, data, {"task.negatives.sampler": "popularity"} if family == "hstu" else {})
    dataset = Dataset.open(cfg.data.folder)
    task = make_task(cfg.task, dataset, seed=1, dtype="float32")
    BatchLoader(task.assembler, BatchConfig(batch_samples=8), seed=1).build(BatchPosition())
    assert max(asked) <= 8 < dataset.num_samples


def test_large_datasets_are_shuffled_by_blocks_of_rows_that_lie_together(data, monkeypatch):
    cfg = config_of("hstu", data)

    def order_of() -> np.ndarray:
        task = make_task(cfg.task, Dataset.open(cfg.data.folder), seed=1, dtype="float32")
        batches = BatchLoader(task.assembler, BatchConfig(batch_samples=5), seed=1)
        return np.concatenate(
            [batches.order.samples(BatchPosition(0, s)) for s in range(batches.order.steps_in_epoch(0))]
        )

    whole = order_of()
    assert np.ptp(whole[:10]) > 10, "all samples are shuffled where they fit"
    monkeypatch.setattr(module, "SHUFFLED_WHOLE_BYTES", 100)
    narrow = Dataset.open(cfg.data.folder).only(["item_ids"])
    monkeypatch.setattr(module, "BLOCK_BYTES", narrow.decoded_bytes // 4)
    blocks = order_of()
    assert sorted(blocks) == sorted(whole)
    assert np.ptp(blocks[:5]) == 4, "items and times: an eighth of the samples is a block"


@pytest.mark.parametrize(("readable", "wait_ms", "told"), [(500, 0, "keeps up"), (120, 50, "is short by 40%")])
def test_the_report_says_whether_reading_keeps_up(readable, wait_ms, told):
    step = {"samples_per_s": 100.0, "step_ms": 100.0, "readable_per_s": readable, "parts": {"data.wait": wait_ms}}
    lists = {name: [] for name in ("evaluations", "events", "windows", "spans", "problems")}
    told_of = {name: {} for name in ("config", "versions", "card", "parameters")}
    run = RunRecords(folder=Path(), steps=[{"step": n, **step} for n in (10, 20)], **lists, **told_of)
    assert f"Reading {told}" in str(speed(run))
