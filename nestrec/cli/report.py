"""What `nestrec report` adds to what a run has recorded: recommendations for a few users of its test."""

import itertools
from pathlib import Path

import numpy as np

from nestrec.base.errors import UserError
from nestrec.data.dataset import Dataset
from nestrec.library.loaded import load
from nestrec.report.markup import Markup
from nestrec.report.sections.samples import Sample, samples
from nestrec.training.run_folder import RunFolder

NUM_USERS, NUM_BEFORE, NUM_RECOMMENDED = 4, 4, 5


def sample_recommendations(run: Path) -> dict[str, Markup | None]:
    """A section for a tested retrieval run; nothing where the model or its data are not at hand."""
    file = run / "eval" / "test.npz"
    try:
        cfg = RunFolder(run).config()
        if cfg.task.kind != "retrieval" or not file.is_file():
            return {}
        dataset = Dataset.open(cfg.data.folder)
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as kept:
            users = kept["users"]
        found = _samples(run, dataset, np.sort(users)[:: max(1, len(users) // NUM_USERS)][:NUM_USERS])
    except (UserError, OSError, ValueError, KeyError):
        return {}  # a report is made of whatever there is: the run may be young, and its data elsewhere
    return {"Sample recommendations": samples(found, _titles(dataset))}


def _samples(run: Path, dataset: Dataset, users: "np.typing.NDArray[np.int64]") -> list[Sample]:
    rows = dataset.rows(users)
    keys = ["", *dataset.items().column("item_key").to_pylist()]
    items, offsets = rows.lists["item_ids"]
    times = rows.lists["timestamps_ms"][0] if dataset.card.has_timestamps else None
    histories, targets = [], []
    for start, end in itertools.pairwise(offsets.tolist()):
        history: dict[str, object] = {"items": [keys[i] for i in items[start : end - 1]]}
        if times is not None:
            history |= {"times_ms": times[start : end - 1].tolist(), "now_ms": int(times[end - 1])}
        histories.append(history)
        targets.append(keys[items[end - 1]])
    answers = load(run).recommend_all(histories, NUM_RECOMMENDED)
    return [
        Sample(user, list(history["items"])[-NUM_BEFORE:], answer.items, target)  # type: ignore[call-overload]
        for user, history, answer, target in zip(dataset.user_keys(users), histories, answers, targets, strict=True)
    ]


def _titles(dataset: Dataset) -> dict[str, str]:
    """Item key to what people call the item."""
    named = zip(dataset.items().column("item_key").to_pylist(), dataset.item_texts(), strict=False)
    return {key: text for key, text in named if text}
