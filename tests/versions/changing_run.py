"""A run whose rows, weights and catalog change at random, for tests of its published versions.

The sessions and tables are real, but random gradients replace the computed ones. Rows are updated, evicted and expire,
items are added, and dense weights change, hundreds of times per second.
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
from nestrec.exporters.servable_writer import description_files, servable_from_session
from nestrec.exporters.version_publisher import Publisher
from nestrec.serving.model.servable import Servable
from nestrec.serving.versions.live_version import LiveModelVersion
from nestrec.serving.versions.version_store import VersionStore
from nestrec.training.run_config import PublishConfig
from nestrec.training.training_session import Session
from support.tiny_runs import config_of

TABLES = {
    "static": {},
    "lru": {"tables.*.id_mode": "dynamic", "tables.*.eviction_policy": "lru", "tables.*.max_rows": 24},
    "ttl": {"tables.*.id_mode": "dynamic", "tables.*.eviction_policy": "ttl", "tables.*.ttl_steps": 12},
    "hashed": {"tables.items.id_mode": "hashed", "tables.items.num_rows": 24},
    "narrow": {"tables.items.dim": 4},
    "graphs": {
        "tables.*.id_mode": "dynamic",
        "task.encoder.dim": 64,
        "task.encoder.head_dim": 32,
        "task.encoder.position_bias": "false",
    },
}
"""Options of a run by kind of table. The catalog grows only with tables whose ids need not be dense, see `begin`."""


class FirstItemsDataset:
    """View of a dataset with its first `num_items` items only."""

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
    """A session and its publisher. `change` applies one random training step."""

    session: Session
    publisher: Publisher
    full_dataset: Dataset
    random: np.random.Generator
    """Random generator with the same state on all ranks."""
    rank_random: np.random.Generator
    """Random generator of this rank."""
    step: int = 0

    @staticmethod
    def begin(
        topology: Topology,
        data: Path,
        address: str,
        *,
        family: str,
        store: str,
        seed: int,
        full_every_versions: int = 7,
    ) -> "ChangingRun":
        session = Session.open(config_of(family, data, TABLES[store]), topology)
        publish = PublishConfig(
            address=address, full_every_versions=full_every_versions, max_versions=full_every_versions + 3
        )
        full_dataset = session.dataset
        if store not in ("static", "narrow"):
            session = dataclasses.replace(session, dataset=FirstItemsDataset(full_dataset, full_dataset.num_items // 2))
            session.task.num_ids = {**session.task.num_ids, "items": session.dataset.num_items + 1}
        rank_random = np.random.default_rng([seed, topology.rank])
        random = np.random.default_rng(seed)
        return ChangingRun(session, Publisher(publish, session), full_dataset, random, rank_random)

    def change(self) -> None:
        """Update some rows of each table and the dense weights; with probability 0.3, also add one or two items."""
        self.step += 1
        engine = self.session.engine
        if isinstance(self.session.dataset, FirstItemsDataset) and self.random.random() < 0.3:
            num_items = self.session.dataset.num_items + int(self.random.integers(1, 3))
            num_items = min(self.full_dataset.num_items, num_items)
            dataset = FirstItemsDataset(self.full_dataset, num_items)
            self.session = dataclasses.replace(self.session, dataset=dataset)
            self.session.task.num_ids = {**self.session.task.num_ids, "items": num_items + 1}
        keys = {}
        for table in engine.tables.values():
            rows = self.session.dataset.num_items + 1 if table.name == "items" else 3
            for feature in table.feature_names:
                keys[feature] = self.rank_random.integers(0, rows, int(self.rank_random.integers(0, 6)))
        routed = engine.route(keys, step=self.step)
        working = engine.fetch_rows(routed, step=self.step)
        vectors = engine.exchange_vectors(routed, working)
        gradients = {
            name: torch.from_numpy(self.rank_random.normal(size=tuple(v.shape))).to(v) for name, v in vectors.items()
        }
        engine.accumulate(routed, working, gradients)
        engine.update(working, learning_rate=0.1)
        engine.write_back(working)
        with torch.no_grad():
            for parameter in self.session.task.model.parameters():
                noise = torch.from_numpy(self.random.normal(size=tuple(parameter.shape)))
                parameter.add_(noise.to(parameter) * 0.01)

    def export(self, scratch: Path) -> Servable:
        servable = servable_from_session(self.session, self.step, scratch)
        return dataclasses.replace(servable, model=deepcopy(servable.model))


def publish_versions(topology: Topology, data: Path, scratch: Path, kind: tuple[str, str], count: int) -> int:
    """Publish versions and follow them on the first rank; compare each version with an export of its step.

    Args:
        topology: Topology of the ranks.
        data: Folder of the dataset.
        scratch: Folder for the published versions and for exports.
        kind: Family of the model, and kind of its tables (a key of `TABLES`).
        count: Number of versions.

    Returns:
        Number of rows that the deltas removed; 0 on all ranks but the first.
    """
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
            followed = LiveModelVersion.open(versions, versions.chain_from_full(target))
        else:
            (step,) = versions.delta_chain(target, followed.step.manifest.version)
            removed += sum(len(versions.removed_keys(step, table)) for table in step.manifest.tables)
            staged = followed.stage(versions, step)
            staged.apply()
            followed = staged.after
        assert_same(followed.servable, exported)
        if number % 5 == 4:  # a server that starts now has the same content
            assert_same(LiveModelVersion.open(versions, versions.chain_from_full(target)).servable, exported)
    return removed


def assert_same(served: Servable, exported: Servable) -> None:
    """Check that two servables are bitwise equal."""
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
    described = description_files(exported)
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
