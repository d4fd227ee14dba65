"""Runs on a log with features of every kind, and requests with the features of its users."""

import csv
from pathlib import Path

import numpy as np

from nestrec.base.config_overrides import apply_overrides
from nestrec.data.dataset import Dataset
from nestrec.distributed import Topology
from nestrec.exporters.servable_writer import export_run
from nestrec.training.recipes import recipe
from nestrec.training.trainer import Trainer
from support.featured_log import (
    EVENT_FEATURES,
    EVENT_LIST_FEATURES,
    ITEM_FEATURES,
    USER_FEATURES,
    USER_VECTOR_FEATURES,
    write_featured_log,
)

SMALL = {
    "task.encoder.dim": "8",
    "task.encoder.head_dim": "4",
    "training.device": "cpu",
    "training.max_steps": "2",
    "training.eval_every_epochs": "0",
    "task.inputs.item_features": ",".join(ITEM_FEATURES),
    "task.inputs.event_features": "device,place",
    "task.inputs.user_features": "country,age",
    "tables.tags.dim": "4",
}
ROLES = {
    "retrieval": (
        "demo",
        {
            "data.synthetic": "none",
            "task.history.max_events": "12",
            "task.encoder.max_length": "12",
            "task.negatives.num_negatives": "4",
            "task.inputs.context_features": "device,place",
        },
    ),
    "ranking": ("ranking", {"task.encoder.max_length": "16", "task.history.max_events": "8"}),
}
PREFIX = {"task.inputs.user_feature_mode": "prefix", "task.encoder.attention.window": "4"}
ALL_EVENT_FEATURES = (*EVENT_FEATURES, *EVENT_LIST_FEATURES)
ALL_USER_FEATURES = (*USER_FEATURES, *USER_VECTOR_FEATURES)
EVERY_KIND = {
    "task.inputs.event_features": ",".join(ALL_EVENT_FEATURES),
    "task.inputs.user_features": ",".join(ALL_USER_FEATURES),
}
VARIANTS = {
    "retrieval, prefix": (
        "demo",
        {**ROLES["retrieval"][1], **PREFIX, **EVERY_KIND, "task.inputs.context_features": ",".join(ALL_EVENT_FEATURES)},
    ),
    # An odd number of tokens before the two of each event, and features whose products the head reads.
    "ranking, prefix": (
        "ranking",
        {**ROLES["ranking"][1], **PREFIX, "task.inputs.user_features": "country", "task.head.interactions": "true"},
    ),
    "ranking, dlrm": (
        "ranking",
        {
            **ROLES["ranking"][1],
            **EVERY_KIND,
            "task.head.interactions": "true",
            "task.encoder.num_layers": "0",
            "tables.filters.pooling": "sum",
        },
    ),
    "ranking, every kind": ("ranking", {**ROLES["ranking"][1], **EVERY_KIND, "tables.query.dim": "4"}),
}
"""Other models for the same log, by name: role and options. One is a DLRM with pooled bags."""


class Runs:
    """Runs of each role and variant with their exports, created on first use.

    Args:
        log: Folder of the log, its dataset, the runs and the exports.
        seed: Seed of the log.
    """

    def __init__(self, log: Path, *, seed: int = 0):
        self.log = log
        self.data = write_featured_log(log, seed=seed)
        self._trainers: dict[str, Trainer] = {}

    def trainer(self, role: str) -> Trainer:
        if role not in self._trainers:
            name, more = (ROLES | VARIANTS)[role]
            cfg = apply_overrides(recipe(name), {**SMALL, **more, "data.folder": str(self.data)})
            self._trainers[role] = Trainer(cfg, self.run(role), Topology.single())
            self._trainers[role].train()
            export_run(self.run(role), self._export(role), best=False)
        return self._trainers[role]

    def run(self, role: str) -> Path:
        return self.log / "runs" / role

    def folder(self, role: str) -> Path:
        """Return the export folder of a role or variant."""
        self.trainer(role)
        return self._export(role)

    def _export(self, role: str) -> Path:
        return self.log / "exports" / role


def request_for(runs: Runs, user: int, length: int) -> tuple[dict, dict, str]:
    """Return a request for a user of the log.

    Args:
        runs: Runs on the log.
        user: Index of the user in the dataset.
        length: Number of events in the history.

    Returns:
        History of the first `length` events, context of the next event (of the last one if all are in the history), and
        the item of that event.
    """
    dataset = Dataset.open(runs.data)
    rows = dataset.rows(np.array([user]))
    key = dataset.user_keys(np.array([user]))[0]
    with (runs.log / "log.csv").open() as log, (runs.log / "users.csv").open() as users:
        raw = sorted((row for row in csv.DictReader(log) if row["user"] == key), key=lambda row: int(row["at"]))
        user_row = next(row for row in csv.DictReader(users) if row["user"] == key)
    lists = [row["filters"].split("|") if row["filters"] else None for row in raw]
    queries = [row["query"] for row in raw]
    keys = dataset.items()["item_key"].to_pylist()
    devices = [None, *dataset.vocabulary("event_device")["key"].to_pylist()]
    countries = [None, *dataset.vocabulary("user_country")["key"].to_pylist()]
    values_of = {name: values for name, (values, _) in rows.lists.items()}
    next_event = min(length, len(raw) - 1)
    numeric_values = [None if np.isnan(value) else float(value) for value in values_of["event_place"]]
    device_names = [devices[i] for i in values_of["event_device"]]
    history = {
        "items": [keys[i - 1] for i in values_of["item_ids"][:length]],
        "times_ms": values_of["timestamps_ms"][:length],
        "actions": values_of["actions"][:length].astype(int).tolist(),
        "features": {
            "device": device_names[:length],
            "place": numeric_values[:length],
            "query": queries[:length],
            "filters": lists[:length],
        },
        "user_features": {
            "country": countries[int(rows.scalars["user_country"][0])],
            "age": float(rows.scalars["user_age"][0]),
            "languages": user_row["languages"].split("|") if user_row["languages"] else [],
            "taste": np.load(runs.log / "tastes.npy")[int(key[1:])].tolist(),
        },
        "now_ms": int(values_of["timestamps_ms"][next_event]),
    }
    context = {
        "device": device_names[next_event],
        "place": numeric_values[next_event],
        "query": queries[next_event],
        "filters": lists[next_event],
    }
    return history, context, keys[values_of["item_ids"][next_event] - 1]


def select_features(task, history: dict, context: dict) -> tuple[dict, dict]:
    """Return the history and the context with only those features that the model of a task reads."""
    user_features = {name: history["user_features"][name] for name in task.inputs.user_features}
    event_features = {name: history["features"][name] for name in task.inputs.event_features}
    next_context = {name: context[name] for name in task.inputs.event_features}
    return {**history, "user_features": user_features, "features": event_features}, next_context
