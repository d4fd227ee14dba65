"""A run whose rows, weights and catalogue change at random, for tests of what is published of it.

Real sessions with real tables, which are updated with random gradients instead of learnt ones: rows are touched,
evicted and past their time, items come, and dense weights move, hundreds of times a second.
"""

import dataclasses
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestrec.artifacts.storage import storage_of
from nestrec.data.dataset import Dataset
from nestrec.distributed import Topology
from nestrec.exporters.servable_writer import descriptions, servable_of_session
from nestrec.exporters.version_publisher import Publisher
from nestrec.serving.model.servable import Servable
from nestrec.serving.versions.live_version import LiveModelVersion
from nestrec.serving.versions.version_store import VersionStore
from nestrec.training.run_config import PublishConfig
from nestrec.training.training_session import Session
from support.tiny_runs import config_of

TABLES = {
    "static": {},
    "lru": {"tables.*.ids": "dynamic", "tables.*.eviction": "lru", "tables.*.max_rows": 24},
    "ttl": {"tables.*.ids": "dynamic", "tables.*.eviction": "ttl", "tables.*.ttl_steps": 12},
    "hashed": {"tables.items.ids": "hashed", "tables.items.rows": 24},
    "narrow": {"tables.items.dim": 4},
    "graphs": {
        "tables.*.ids": "dynamic",
        "task.encoder.dim": 64,
        "task.encoder.head_dim": 32,
        "task.encoder.position_bias": "false",
    },
}
"""options of a run; only tables of ids that need not be dense are read beyond the first items"""


class FirstItems:
    """A dataset as it was when it had fewer items."""

    def __init__(self, dataset: Dataset, num_items: int):
        self._dataset = dataset
        self.num_items = num_items
        counts = dataclasses.replace(dataset.card.counts, items=num_items)
        self.card = dataclasses.replace(dataset.card, counts=counts)

    def items(self) -> Any:
        return self._dataset.items().slice(0, self.num_items)

    def item_texts(self) -> list[str]:
        return self._dataset.item_texts()[: self.num_items]

    def vocabulary(self, column: str) -> Any:
        return self._dataset.vocabulary(column)


@dataclass
class ChangingRun:
    session: Session
    publisher: Publisher
    dataset: Dataset
    random: np.random.Generator
    own: np.random.Generator
    """of this rank"""
    step: int = 0

    @staticmethod
    def begin(
        topology: Topology, data: Path, address: str, *, family: str, store: str, seed: int, snapshot_every: int = 7
    ) -> "ChangingRun":
        session = Session.open(config_of(family, data, TABLES[store]), topology)
        publish = PublishConfig(address=address, snapshot_every=snapshot_every, keep=snapshot_every + 3)
        whole = session.dataset
        if store not in ("static", "narrow"):
            session = dataclasses.replace(session, dataset=FirstItems(whole, whole.num_items // 2))
            session.task.num_ids = {**session.task.num_ids, "items": session.dataset.num_items + 1}
        own = np.random.default_rng([seed, topology.rank])
        return ChangingRun(session, Publisher(publish, session), whole, np.random.default_rng(seed), own)

    def change(self) -> None:
        """One step: some rows of each table, and dense weights; now and then an item comes."""
        self.step += 1
        engine = self.session.engine
        if isinstance(self.session.dataset, FirstItems) and self.random.random() < 0.3:
            num_items = min(self.dataset.num_items, self.session.dataset.num_items + int(self.random.integers(1, 3)))
            self.session = dataclasses.replace(self.session, dataset=FirstItems(self.dataset, num_items))
            self.session.task.num_ids = {**self.session.task.num_ids, "items": num_items + 1}
        keys = {}
        for table in engine.tables.values():
            rows = self.session.dataset.num_items + 1 if table.name == "items" else 3
            for feature in table.feature_names:
                keys[feature] = self.own.integers(0, rows, int(self.own.integers(0, 6)))
        routed = engine.route(keys, step=self.step)
        working = engine.fetch(routed, step=self.step)
        vectors = engine.exchange_vectors(routed, working)
        moved = {name: torch.from_numpy(self.own.normal(size=tuple(v.shape))).to(v) for name, v in vectors.items()}
        engine.accumulate(routed, working, moved)
        engine.update(working, learning_rate=0.1)
        engine.write_back(working)
        with torch.no_grad():
            for parameter in self.session.task.model.parameters():
                parameter.add_(torch.from_numpy(self.random.normal(size=tuple(parameter.shape))).to(parameter) * 0.01)

    def export(self, scratch: Path) -> Servable:
        servable = servable_of_session(self.session, self.step, scratch)
        return dataclasses.replace(servable, model=deepcopy(servable.model))


def publish_versions(topology: Topology, data: Path, scratch: Path, kind: tuple[str, str], count: int) -> int:
    """Publish so many versions, and follow them on the first rank: each is compared with an export of its step. How
    many rows were removed on the way. kind: family of the model, and store of its tables."""
    address = str(scratch / "published")
    run = ChangingRun.begin(topology, data, address, family=kind[0], store=kind[1], seed=count)
    versions = VersionStore(storage_of(address))
    followed = None
    removed = 0
    for number in range(count):
        for _ in range(int(run.random.integers(1, 4))):
            run.change()
        run.publisher.publish(run.session, run.step)
        run.publisher.close()
        exported = run.export(scratch)
        if topology.rank:
            continue
        newest = versions.newest()
        assert newest is not None
        assert newest.number == number + 1
        target = (newest.folder, newest.version)
        if followed is None:
            followed = LiveModelVersion.open(versions, versions.way_from_full(target))
        else:
            (step,) = versions.way(target, followed.step.manifest.version)
            removed += sum(len(versions.removed(step, table)) for table in step.manifest.tables)
            staged = followed.staged(versions, step)
            staged.apply()
            followed = staged.after
        assert_same(followed.servable, exported)
        if number % 5 == 4:  # who begins now comes to the same
            assert_same(LiveModelVersion.open(versions, versions.way_from_full(target)).servable, exported)
    return removed


def assert_same(served: Servable, exported: Servable) -> None:
    """To the bit."""
    assert served.spec == exported.spec
    assert served.item_keys == exported.item_keys
    assert served.item_titles == exported.item_titles
    for name, weight in exported.model.state_dict().items():
        assert torch.equal(served.model.state_dict()[name], weight), name
    for name, table in exported.tables.items():
        assert_same_rows(served.tables[name], table, name)
    assert (served.index is None) == (exported.index is None)
    if exported.index is not None:
        assert_same_rows(served.index, exported.index, "index")
    described = descriptions(exported)
    for name, column in described.get("item_columns.safetensors", {}).items():
        assert torch.equal(served.item_columns[name][: len(column)], column), name
    ids = served.ids_of([*exported.item_keys, "no such item"])
    assert ids.tolist() == [*range(1, len(exported.item_keys) + 1), 0]


def assert_same_rows(served: Any, exported: Any, name: str) -> None:
    assert served.num_rows == exported.num_rows, name
    rows = torch.cat([part for _, part in served.parts()])
    expected = torch.cat([part for _, part in exported.parts()])
    assert rows.dtype == expected.dtype, name
    assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8)), name
