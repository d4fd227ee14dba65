"""What is asked of all training events: read by row groups, so that no rank ever holds them all."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from nestrec.data.dataset import Dataset
from nestrec.data.gather import add_counts
from nestrec.data.samples.slices import slice_index
from nestrec.data.schema import ACTIONS, ITEM_IDS

Ints = NDArray[np.int64]


def training_items(dataset: Dataset, train_end: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Of some users at a time: (users, items of their training events, offsets of the users)."""
    for first, group in dataset.scan([ITEM_IDS]):
        items, offsets = group.lists[ITEM_IDS]
        users = np.arange(first, first + len(offsets) - 1)
        index, own_offsets = slice_index(offsets[:-1], offsets[:-1] + train_end[users])
        yield users, items[index], own_offsets


def item_counts(dataset: Dataset, train_end: Ints) -> Ints:
    """(items + 1,) training events of each item id."""
    counts = np.zeros(dataset.num_items + 1, np.int64)
    for _, items, _ in training_items(dataset, train_end):
        add_counts(items, counts)
    return counts


def target_weights(
    dataset: Dataset, train_end: Ints, max_targets: int, weight_of: Callable[[Ints], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """(users,) sums over the last training events of each user, without its first, of what a mask of actions counts."""
    sums = np.zeros(dataset.num_samples)
    for first, group in dataset.scan([ACTIONS]):
        masks, offsets = group.lists[ACTIONS]
        users = np.arange(first, first + len(offsets) - 1)
        end = offsets[:-1] + train_end[users]
        start = np.maximum(np.minimum(offsets[:-1] + 1, end), end - max_targets)
        index, own_offsets = slice_index(start, end)
        total = np.concatenate([[0.0], np.cumsum(weight_of(masks[index].astype(np.int64)))])
        sums[users] = total[own_offsets[1:]] - total[own_offsets[:-1]]
    return sums
