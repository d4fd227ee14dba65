"""Runs on a log with features of every kind, and what requests tell of its users."""

import csv
from pathlib import Path

import numpy as np

from nestrec.base.config_overrides import with_overrides
from nestrec.data.dataset import Dataset
from nestrec.distributed import Topology
from nestrec.exporters.servable_writer import export_run
from nestrec.training.recipes import recipe
from nestrec.training.trainer import Trainer
from support.featured_log import (
    EVENT_FEATURES,
    ITEM_FEATURES,
    MORE_OF_EVENTS,
    MORE_OF_USERS,
    USER_FEATURES,
    write_featured_log,
)

SMALL = {
    "task.encoder.dim": "8",
    "task.encoder.head_dim": "4",
    "training.device": "cpu",
    "training.max_steps": "2",
    "training.evaluate_every_epochs": "0",
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
            "task.history.max_length": "12",
            "task.encoder.max_length": "12",
            "task.num_negatives": "4",
            "task.inputs.context": "device,place",
        },
    ),
    "ranking": ("ranking", {"task.encoder.max_length": "16", "task.inputs.max_events": "8"}),
}
PREFIX = {"task.inputs.user_tokens": "prefix", "task.encoder.attention.window": "4"}
OF_EVENTS, OF_USERS = (*EVENT_FEATURES, *MORE_OF_EVENTS), (*USER_FEATURES, *MORE_OF_USERS)
EVERY_KIND = {"task.inputs.event_features": ",".join(OF_EVENTS), "task.inputs.user_features": ",".join(OF_USERS)}
VARIANTS = {
    "retrieval, prefix": (
        "demo",
        {**ROLES["retrieval"][1], **PREFIX, **EVERY_KIND, "task.inputs.context": ",".join(OF_EVENTS)},
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
"""Ways in which a model reads the same; one is a DLRM with pooled bags."""


class Runs:
    """A run of each role and variant with its export, each made when it is asked for."""

    def __init__(self, log: Path, *, seed: int = 0):
        self.log = log
        self.data = write_featured_log(log, seed=seed)
        self._trainers: dict[str, Trainer] = {}

    def trainer(self, role: str) -> Trainer:
        if role not in self._trainers:
            name, more = (ROLES | VARIANTS)[role]
            cfg = with_overrides(recipe(name), {**SMALL, **more, "data.folder": str(self.data)})
            self._trainers[role] = Trainer(cfg, self.run(role), Topology.single())
            self._trainers[role].train()
            export_run(self.run(role), self._export(role), best=False)
        return self._trainers[role]

    def run(self, role: str) -> Path:
        return self.log / "runs" / role

    def folder(self, role: str) -> Path:
        """Of the export."""
        self.trainer(role)
        return self._export(role)

    def _export(self, role: str) -> Path:
        return self.log / "exports" / role


def request_of(runs: Runs, user: int, length: int) -> tuple[dict, dict, str]:
    """The first events of a user as a request tells them, the context of the next one (of all events, that of the last
    one), and its item."""
    dataset = Dataset.open(runs.data)
    rows = dataset.rows(np.array([user]))
    key = dataset.user_keys(np.array([user]))[0]
    with (runs.log / "log.csv").open() as log, (runs.log / "users.csv").open() as users:
        raw = sorted((row for row in csv.DictReader(log) if row["user"] == key), key=lambda row: int(row["at"]))
        of_user = next(row for row in csv.DictReader(users) if row["user"] == key)
    lists = [row["filters"].split("|") if row["filters"] else None for row in raw]
    queries = [row["query"] for row in raw]
    keys = dataset.items()["item_key"].to_pylist()
    devices = [None, *dataset.vocabulary("event_device")["key"].to_pylist()]
    countries = [None, *dataset.vocabulary("user_country")["key"].to_pylist()]
    of = {name: values for name, (values, _) in rows.lists.items()}
    at = min(length, len(raw) - 1)
    places = [None if np.isnan(value) else float(value) for value in of["event_place"]]
    named = [devices[i] for i in of["event_device"]]
    history = {
        "items": [keys[i - 1] for i in of["item_ids"][:length]],
        "times_ms": of["timestamps_ms"][:length],
        "actions": of["actions"][:length].astype(int).tolist(),
        "features": {
            "device": named[:length],
            "place": places[:length],
            "query": queries[:length],
            "filters": lists[:length],
        },
        "user_features": {
            "country": countries[int(rows.scalars["user_country"][0])],
            "age": float(rows.scalars["user_age"][0]),
            "languages": of_user["languages"].split("|") if of_user["languages"] else [],
            "taste": np.load(runs.log / "tastes.npy")[int(key[1:])].tolist(),
        },
        "now_ms": int(of["timestamps_ms"][at]),
    }
    context = {"device": named[at], "place": places[at], "query": queries[at], "filters": lists[at]}
    return history, context, keys[of["item_ids"][at] - 1]


def known_to(task, history: dict, context: dict) -> tuple[dict, dict]:
    """What a request tells a model that reads some of the features."""
    of_user = {name: history["user_features"][name] for name in task.inputs.user_features}
    of_events = {name: history["features"][name] for name in task.inputs.event_features}
    asked = {name: context[name] for name in task.inputs.event_features}
    return {**history, "user_features": of_user, "features": of_events}, asked
